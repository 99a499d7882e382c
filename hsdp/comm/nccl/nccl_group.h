// The ranks of one Communicator on NCCL: who they are, what they agree on before a call, and how a
// call gets onto a stream.
//
// One call at a time. Errors end the world.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/nccl/nccl_link.h"
#include "hsdp/comm/nccl/nccl_memory.h"
#include "hsdp/comm/planned_calls.h"
#include "hsdp/device/scratch.h"
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

  [[nodiscard]] NcclMemory& memory() { return memory_; }

  // What a call needs beside its arguments, on its stream.
  struct WorkNeed {
    std::size_t bytes = 0;
    bool of_either_kind = false;  // it sends from there, too: registered or not
    bool between_kinds = false;   // only where one of `in` and `out` is registered
  };
  struct Call {
    HostCall terms;
    // What NCCL may read, and what it may write that it does not read.
    ConstTensorView in{};
    ConstTensorView out{};
    WorkNeed work{};
    std::string_view act{};  // see CallLabel
  };
  // Returns when every rank makes this same call; a difference ends the world. Where a rank has no
  // memory for the work it is an AgreedError. A planned call that was agreed on before, and whose
  // work memory was reserved, returns at once.
  void agree(const Call& call, const Stream& stream);
  void agree(const HostCall& terms) { agree({.terms = terms}, Stream::inline_host()); }
  // Of the call that was agreed on, on every rank that has a byte of them.
  [[nodiscard]] bool in_is_registered() const { return registered_.in; }
  [[nodiscard]] bool out_is_registered() const { return registered_.out; }
  // The work memory of that call, in a task of its stream; `registered` as what it exchanges rows
  // with is.
  [[nodiscard]] std::byte* work(std::size_t bytes, bool registered, Stream& stream);
  // Registered work memory for that call. Where there can be none, nothing is registered any more.
  void require_registered_work(std::size_t bytes);
  // The calls that `issue` makes, as one group of the call that was agreed on.
  void send_group(const std::function<void(NcclHandle)>& issue) { link_->group(waiting_, issue); }
  // What a collective leaves of what others sent, in up to two parts, and the word that says that
  // it is not finite.
  struct Result {
    TensorView out;
    TensorView rest{};
    std::atomic<std::uint32_t>* nonfinite = nullptr;
  };
  // Runs `enqueue` in a task of `stream`, of a GPU, and has the watch follow what it enqueues.
  // Where the collective is aborted, `result` becomes NaN, on the GPU and in the stream's order.
  void enqueue(Stream& stream, const Result& result, const std::function<void(Stream&)>& enqueue);
  // Blocks until the GPU has done the last of the calls, which come in one order.
  void wait_for_calls() const;
  // One small message from every member to every member, in group order.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& what,
                                                  const std::string& message);
  // Null in a group of one.
  [[nodiscard]] PlannedCalls* planned_calls() const { return planned_calls_.get(); }
  // Ends the world because of what NCCL said in the call that was agreed on, and throws why.
  [[noreturn]] void fail(const NcclError& error);

 private:
  struct Registered {  // a call's memory, on every rank that has a byte of it
    bool in = false;
    bool out = false;
  };
  // What every rank says of this call.
  [[nodiscard]] std::vector<HostCall> exchange_calls(const HostCall& mine);
  [[nodiscard]] bool has_work(const WorkNeed& work) const;
  // Of the call that was agreed on.
  [[nodiscard]] std::function<void()> tell_of_wait() const;
  // Says what is wrong where there is none.
  [[nodiscard]] std::string take_scratch(const WorkNeed& work, std::uint32_t in, std::uint32_t out,
                                         const Stream& stream);
  // An AgreedError where a rank's call has none.
  void require_work(std::span<const HostCall> calls, const WorkNeed& work,
                    const std::string& own_reason);
  // Whether one of two memories of every rank's call is registered; ranks that differ end the
  // world.
  [[nodiscard]] bool agree_on_memory(std::span<const HostCall> calls, unsigned shift);

  std::shared_ptr<NcclWorld> world_;
  std::shared_ptr<NcclLink> link_;
  std::string id_;
  std::vector<int> members_;
  std::vector<int> ascending_;
  int rank_ = 0;
  std::uint64_t sequence_ = 0;
  WaitState waiting_{.operation = "connect"};
  NcclMemory memory_;
  Event last_;                      // the last collective that was enqueued
  std::optional<Scratch> scratch_;  // of the call that was agreed on
  Registered registered_;
  std::shared_ptr<PlannedCalls> planned_calls_;  // null in a group of one
};

}  // namespace hsdp::comm
