// The engine for GPUs, on libnccl.
//
// See engine.h for the contract. Memory lies on the world's device. On a stream of that device a
// call returns when everything is enqueued: it waits for the peers to make the same call, never for
// the GPU. On a host stream the collective is complete when the task is. All communicators of a
// process must issue their collectives in the same order on every rank (IssueOrder).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/call_guard.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/nccl/nccl_group.h"

namespace hsdp::comm {

class NcclEngine : public Communicator::Engine, public std::enable_shared_from_this<NcclEngine> {
 public:
  explicit NcclEngine(std::unique_ptr<NcclGroup> group);
  ~NcclEngine() override;
  NcclEngine(const NcclEngine&) = delete;
  NcclEngine& operator=(const NcclEngine&) = delete;

  [[nodiscard]] int rank() const override { return group_->rank(); }
  [[nodiscard]] const std::vector<int>& world_ranks() const override { return group_->members(); }
  [[nodiscard]] Transport transport() const override;
  [[nodiscard]] std::string_view name() const override { return "nccl"; }
  [[nodiscard]] const std::string& group_id() const override { return group_->id(); }
  [[nodiscard]] Control& control() const override { return group_->control(); }

  void reduce_scatter(const ReduceScatter& args, Stream& stream) override;
  void all_reduce(const AllReduce& args, Stream& stream) override;
  void all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override;
  void all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override;
  void broadcast(TensorView data, int root, Stream& stream) override;
  void barrier(Stream& stream) override;
  [[nodiscard]] std::shared_ptr<Engine> split(int color, int key) override;
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype) override;
  void reserve(std::span<const ReduceScatter> calls) override;
  void reserve(std::span<const AllReduce> calls) override;
  [[nodiscard]] std::int64_t reserved_bytes() const override {
    return group_->memory().work_bytes();
  }
  [[nodiscard]] comm::PlannedCalls* planned_calls() const override {
    return group_->planned_calls();
  }
  void wait(const Event& event) override;

 private:
  struct Call {
    NcclGroup::Call agreed;
    NcclGroup::Result result{};
    std::function<void(NcclGroup&, Stream&)> enqueue;
  };
  struct WorkSizes {
    void add(std::size_t size, bool registered) {
      std::size_t& most = bytes[registered ? 1 : 0];
      most = std::max(most, size);
    }
    std::array<std::size_t, 2> bytes{};  // unregistered and registered memory
  };
  // Agrees on the call with the peers and enqueues it, on `stream` or on the engine's stream.
  void run(Call call, Stream& stream);
  void run_on_own_stream(const Call& call);
  void settle_own_stream();
  void agree(const Call& call, const Stream& stream);
  void reserve(const WorkSizes& most);
  // Runs exclusively, and ends the world if it fails half way.
  void run_now(const std::function<void(NcclGroup&)>& call);
  void require_own_device(Device device, std::string_view operation) const;
  [[nodiscard]] Device device() const { return group_->world()->device; }

  std::unique_ptr<NcclGroup> group_;
  CallGuard guard_;
  std::optional<Stream> own_stream_;
  // When waits give up after the world has failed.
  std::atomic<std::chrono::steady_clock::time_point> abort_end_{{}};
};

}  // namespace hsdp::comm
