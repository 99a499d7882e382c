// The built-in engine: ranks of one host use shared memory, others TCP.
//
// See engine.h for the contract. Reductions take one of three paths: direct, if all ranks map each
// other's memory; through scratch, if they could [Note: private memory in tiles]; or by messages.
// Throws in a forked child and if two threads use it at once.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "hsdp/comm/call_guard.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

class HostEngine : public Communicator::Engine, public std::enable_shared_from_this<HostEngine> {
 public:
  explicit HostEngine(std::unique_ptr<HostGroup> group);

  [[nodiscard]] int rank() const override { return group_->rank(); }
  [[nodiscard]] const std::vector<int>& world_ranks() const override { return group_->members(); }
  [[nodiscard]] Transport transport() const override { return group_->transport(); }
  [[nodiscard]] std::string_view name() const override { return "host"; }
  [[nodiscard]] const std::string& group_id() const override { return group_->id(); }
  [[nodiscard]] Control& control() const override { return group_->control(); }
  [[nodiscard]] PlannedCalls* planned_calls() const override { return group_->planned_calls(); }

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

 private:
  // Runs one call in stream order, exclusively, and ends the world if it fails half way.
  void run(Stream& stream, std::function<void(HostGroup&)> call);
  void run_now(const std::function<void(HostGroup&)>& call);
  // The call that says where `memory` lies, if peers can access it.
  [[nodiscard]] HostCall call_on(Operation operation, ConstTensorView memory,
                                 CallLabel label = {}) const;

  std::unique_ptr<HostGroup> group_;
  CallGuard guard_;
};

}  // namespace hsdp::comm
