// Counts the bytes that a Reducer, its hop and users of its slices hold, by kind, as they are
// allocated and freed, so peaks are exact. Copies share the count. Thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace hsdp {

enum class MemoryKind : std::uint8_t {
  kCarry,            // fp32 shard sums, also the result
  kTotal,            // replica-summed totals of groups with sync `all` mid-step
  kStaging,          // buckets in flight
  kLocalSums,        // full-size, sync = none
  kReplicaHop,       // what the hop keeps
  kSnapshot,         // copies not yet written, and one kept for the next
  kOptimizer,        // moments and master weights of slices
  kParameterGather,  // messages of small arrays being gathered
  kScratch,          // on a GPU: work memory of kernels and collectives
};

class MemoryCount {
 public:
  struct Bytes {
    std::int64_t live = 0;
    std::int64_t peak = 0;
  };
  // Bytes that count until it is destroyed. Empty: none.
  using Held = std::shared_ptr<const void>;

  // Counts `bytes` that were just allocated.
  [[nodiscard]] Held hold(MemoryKind kind, std::int64_t bytes) const {
    change(*state_, kind, bytes);
    return {nullptr, [state = state_, kind, bytes](const void*) { change(*state, kind, -bytes); }};
  }
  // Announces bytes that will be held at times while the announcement lives: for a MemoryPlan.
  [[nodiscard]] Held expect(MemoryKind kind, std::int64_t bytes) const {
    const auto announce = [](State& state, MemoryKind its_kind, std::int64_t its_bytes) {
      const std::scoped_lock lock(state.mutex);
      state.expected[static_cast<std::size_t>(its_kind)] += its_bytes;
    };
    announce(*state_, kind, bytes);
    return {nullptr, [announce, state = state_, kind, bytes](const void*) {
              announce(*state, kind, -bytes);
            }};
  }
  [[nodiscard]] std::int64_t expected(MemoryKind kind) const {
    const std::scoped_lock lock(state_->mutex);
    return state_->expected[static_cast<std::size_t>(kind)];
  }
  [[nodiscard]] Bytes of(MemoryKind kind) const {
    const std::scoped_lock lock(state_->mutex);
    return state_->kinds[static_cast<std::size_t>(kind)];
  }
  // The peak of the sum, not the sum of the peaks.
  [[nodiscard]] Bytes all() const {
    const std::scoped_lock lock(state_->mutex);
    return state_->all;
  }

 private:
  struct State {
    std::mutex mutex;
    std::array<Bytes, 9> kinds{};
    std::array<std::int64_t, 9> expected{};
    Bytes all;
  };
  static void change(State& state, MemoryKind kind, std::int64_t bytes) {
    const std::scoped_lock lock(state.mutex);
    for (Bytes* const one : {&state.kinds[static_cast<std::size_t>(kind)], &state.all}) {
      one->live += bytes;
      one->peak = std::max(one->peak, one->live);
    }
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace hsdp
