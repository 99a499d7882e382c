// The ranks of one Communicator on NCCL: who they are, what they agree on before a call, and how a
// call gets onto a stream.
//
// One call at a time. Errors end the world.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/nccl/nccl_link.h"
#include "hsdp/device/stream.h"

namespace hsdp::comm {

class NcclGroup {
 public:
  // `link` is empty for a group of one, which sends nothing.
  NcclGroup(std::shared_ptr<NcclWorld> world, std::unique_ptr<NcclLink> link, std::string id,
            std::vector<int> members);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(members_.size()); }
  [[nodiscard]] const std::vector<int>& members() const { return members_; }  // world ranks
  [[nodiscard]] const std::string& id() const { return id_; }
  [[nodiscard]] std::uint64_t sequence() const { return sequence_; }
  [[nodiscard]] Control& control() const { return *world_->control; }
  [[nodiscard]] const std::shared_ptr<NcclWorld>& world() const { return world_; }
  [[nodiscard]] const NcclLibrary& library() const { return *world_->library; }
  [[nodiscard]] const std::shared_ptr<NcclLink>& link() const { return link_; }

  // Returns when every rank makes this same call; a difference ends the world.
  void agree(const HostCall& mine);
  // The calls that `issue` makes, as one group of the call that was agreed on.
  void send_group(const std::function<void(NcclHandle)>& issue) { link_->group(waiting_, issue); }
  // Runs `enqueue` in a task of `stream`, of a GPU, and has the watch follow what it enqueues.
  void enqueue(Stream& stream, const std::function<void(Stream&)>& enqueue);
  // One small message from every member to every member, in group order.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& what,
                                                  const std::string& message);
  // Ends the world because of what NCCL said in the call that was agreed on, and throws why.
  [[noreturn]] void fail(const NcclError& error);

 private:
  std::shared_ptr<NcclWorld> world_;
  std::shared_ptr<NcclLink> link_;
  std::string id_;
  std::vector<int> members_;
  std::vector<int> ascending_;
  int rank_ = 0;
  std::uint64_t sequence_ = 0;
  WaitState waiting_{.operation = "connect"};
};

}  // namespace hsdp::comm
