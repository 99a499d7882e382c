// Reduce-scatter and all-reduce of private memory in a group that shares memory: the rows go tile
// by tile through scratch that peers read in place [Note: private memory in tiles].
//
// In the step of tile t a rank sums its window of tile t from all scratches, fetches the totals of
// tile t - 1 from their owners' scratches, and copies its rows of tile t + 1 into its own scratch.
// All ranks meet between steps, so two buffers suffice.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hsdp/comm/host/host_group.h"
#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/comm/host/tile_plan.h"

namespace hsdp::comm {

class StagedReduce {
 public:
  // Call it after group.open_scratch(). Borrows `args`.
  StagedReduce(HostGroup& group, const ReduceScatter& args);
  StagedReduce(HostGroup& group, const AllReduce& args);

  // Returns when the collective is complete on this rank.
  void run();

 private:
  using Window = TilePlan::Window;

  void stage(std::int64_t tile);
  void sum(std::int64_t tile);
  void take_totals(std::int64_t tile);
  void encode(const Window& window, std::byte* place) const;
  void decode(const Window& window, const std::byte* total) const;
  // Completes the whole call: fetches the last totals, and learns whether any result is non-finite.
  void complete();

  // The window in a rank's scratch. In its own window a rank has its total instead of a row.
  [[nodiscard]] std::byte* place(int rank, std::int64_t tile, const Window& window) const;
  [[nodiscard]] const std::byte* row_at(const Window& window) const;
  [[nodiscard]] std::byte* result_at(const Window& window) const;
  [[nodiscard]] bool encodes() const { return wire_ != dtype_; }

  HostGroup& group_;
  const std::byte* in_;
  std::byte* out_;  // the element `out_begin_` of the message
  std::int64_t out_begin_;
  Dtype dtype_;  // of the rows in memory
  Dtype wire_;   // of the rows in scratch
  kernels::SumSpec spec_;
  const AllReduce* gather_ = nullptr;  // null: a reduce-scatter
  bool accumulate_ = false;
  bool streaming_stores_ = false;
  std::atomic<std::uint32_t>* nonfinite_;
  std::atomic<std::uint32_t> own_nonfinite_{0};
  TilePlan plan_;
  std::vector<const void*> rows_;
};

}  // namespace hsdp::comm
