// The engine for CPU clusters: host memory, MPI messages, our own sums [Note: the MPI engine].
//
// See engine.h for the contract. Throws in a forked child and if two threads use it at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "hsdp/comm/call_guard.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/mpi/mpi_group.h"

namespace hsdp::comm {

class MpiEngine : public Communicator::Engine, public std::enable_shared_from_this<MpiEngine> {
 public:
  explicit MpiEngine(std::unique_ptr<MpiGroup> group);

  [[nodiscard]] int rank() const override { return group_->rank(); }
  [[nodiscard]] const std::vector<int>& world_ranks() const override { return group_->members(); }
  [[nodiscard]] Transport transport() const override {
    return group_->size() == 1 ? Transport::kNone : Transport::kMpi;
  }
  [[nodiscard]] std::string_view name() const override { return "mpi"; }
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
  // Private memory of this rank: peers receive messages.
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype) override;

 private:
  // Runs one call in stream order, exclusively, and ends the world if it fails half way.
  void run(Stream& stream, std::function<void(MpiGroup&)> call);
  void run_now(const std::function<void(MpiGroup&)>& call);

  std::unique_ptr<MpiGroup> group_;
  CallGuard guard_;
};

}  // namespace hsdp::comm
