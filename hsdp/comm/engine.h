// What an engine (host, nccl, mpi) implements behind Communicator. Arguments are already checked:
// dtypes, devices, counts and cuts fit; size() is at least 2 for collectives that move data.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/control.h"

namespace hsdp {

namespace comm {
class PlannedCalls;
}  // namespace comm

class Communicator::Engine {
 public:
  virtual ~Engine() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual const std::vector<int>& world_ranks() const = 0;
  [[nodiscard]] virtual Transport transport() const = 0;
  [[nodiscard]] virtual std::string_view name() const = 0;
  // Names the group in exchanges: unique in the world, the same on every member.
  [[nodiscard]] virtual const std::string& group_id() const = 0;
  // The control connection of the world that this group belongs to.
  [[nodiscard]] virtual comm::Control& control() const = 0;

  virtual void reduce_scatter(const ReduceScatter& args, Stream& stream) = 0;
  virtual void all_reduce(const AllReduce& args, Stream& stream) = 0;
  virtual void all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                          Stream& stream) = 0;
  virtual void all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                          Stream& stream) = 0;
  virtual void broadcast(TensorView data, int root, Stream& stream) = 0;
  virtual void barrier(Stream& stream) = 0;
  [[nodiscard]] virtual std::shared_ptr<Engine> split(int color, int key) = 0;
  [[nodiscard]] virtual SharedMemory allocate(std::int64_t count, Dtype dtype) = 0;

  // See Communicator::reserve().
  virtual void reserve(std::span<const ReduceScatter> calls) { static_cast<void>(calls); }
  virtual void reserve(std::span<const AllReduce> calls) { static_cast<void>(calls); }
  [[nodiscard]] virtual std::int64_t reserved_bytes() const { return 0; }
  // Null if every call is compared.
  [[nodiscard]] virtual comm::PlannedCalls* planned_calls() const { return nullptr; }
  // See Communicator::wait().
  virtual void wait(const Event& event) { event.wait(); }

  [[nodiscard]] std::string next_exchange_key() {
    return group_id() + "#" + std::to_string(exchanges_.fetch_add(1));
  }

  // Communicator calls it for every engine. Thread-safe.
  void count(CollectiveKind kind, std::size_t bytes) {
    Counter& counter = counters_[static_cast<std::size_t>(kind)];
    counter.calls.fetch_add(1, std::memory_order_relaxed);
    counter.bytes.fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
  [[nodiscard]] CollectiveCounts counts() const {
    CollectiveCounts counts;
    for (std::size_t i = 0; i < counters_.size(); ++i) {
      counts.kinds[i] = {counters_[i].calls.load(std::memory_order_relaxed),
                         counters_[i].bytes.load(std::memory_order_relaxed)};
    }
    return counts;
  }

 private:
  struct Counter {
    std::atomic<std::int64_t> calls{0};
    std::atomic<std::int64_t> bytes{0};
  };
  std::array<Counter, 6> counters_;
  std::atomic<std::int64_t> exchanges_{0};
};

}  // namespace hsdp
