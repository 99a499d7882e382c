// The ranks of one Communicator on NCCL: its members, their agreement before a call, and how a call
// gets onto a stream.
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
  // `link` is null for a group of one, which sends nothing.
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

  // The memory that a call needs besides its arguments, on its stream.
  struct WorkNeed {
    std::size_t bytes = 0;
    bool of_either_kind = false;  // it also sends from there: registered or not
    bool between_kinds = false;   // only if just one of `in` and `out` is registered
  };
  struct Call {
    HostCall terms;
    // What NCCL may read, and what else it may write.
    ConstTensorView in{};
    ConstTensorView out{};
    WorkNeed work{};
    std::string_view act{};  // see CallLabel
  };
  // Returns when every rank makes this call; a difference ends the world. If a rank has no memory
  // for the work, all throw AgreedError. Returns immediately for a planned call that was agreed on
  // before and whose work memory was reserved.
  void agree(const Call& call, const Stream& stream);
  void agree(const HostCall& terms) { agree({.terms = terms}, Stream::inline_host()); }
  // Whether the agreed call's memory is registered, on every rank where it is not empty.
  [[nodiscard]] bool in_is_registered() const { return registered_.in; }
  [[nodiscard]] bool out_is_registered() const { return registered_.out; }
  // The work memory of that call, in a task of its stream; `registered` like the memory it
  // exchanges rows with.
  [[nodiscard]] std::byte* work(std::size_t bytes, bool registered, Stream& stream);
  // Provides registered work memory for that call. If there is none, stops registering altogether.
  void require_registered_work(std::size_t bytes);
  // Sends the NCCL calls that `issue` makes as one group of the agreed call.
  void send_group(const std::function<void(NcclHandle)>& issue) { link_->group(waiting_, issue); }
  // What a collective writes from others' data, in up to two parts, and the word that flags
  // non-finite values.
  struct Result {
    TensorView out;
    TensorView rest{};
    std::atomic<std::uint32_t>* nonfinite = nullptr;
  };
  // Runs `enqueue` in a task of `stream`, of a GPU, and makes the watch follow what it enqueues. If
  // the collective is aborted, `result` becomes NaN, on the GPU and in stream order.
  void enqueue(Stream& stream, const Result& result, const std::function<void(Stream&)>& enqueue);
  // Blocks until the GPU has finished all calls so far, which run in order.
  void wait_for_calls() const;
  // One small message from every member to every member, in group order.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& what,
                                                  const std::string& message);
  // Null in a group of one.
  [[nodiscard]] PlannedCalls* planned_calls() const { return planned_calls_.get(); }
  // Ends the world because of NCCL's error in the agreed call, and throws the failure.
  [[noreturn]] void fail(const NcclError& error);

 private:
  struct Registered {  // a call's memory, on every rank where it is not empty
    bool in = false;
    bool out = false;
  };
  // What every rank says about this call.
  [[nodiscard]] std::vector<HostCall> exchange_calls(const HostCall& mine);
  [[nodiscard]] bool has_work(const WorkNeed& work) const;
  // For the agreed call.
  [[nodiscard]] std::function<void()> tell_of_wait() const;
  // Returns the reason if there is no memory.
  [[nodiscard]] std::string take_scratch(const WorkNeed& work, std::uint32_t in, std::uint32_t out,
                                         const Stream& stream);
  // Throws AgreedError if a rank's call lacks work memory.
  void require_work(std::span<const HostCall> calls, const WorkNeed& work,
                    const std::string& own_reason);
  // Whether one memory of the call is registered on the ranks; a difference between ranks ends the
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
  Event last_;                      // the last collective enqueued
  std::optional<Scratch> scratch_;  // for the agreed call
  Registered registered_;
  std::shared_ptr<PlannedCalls> planned_calls_;  // null in a group of one
};

}  // namespace hsdp::comm
