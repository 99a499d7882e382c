// Reduce-scatter and all-reduce of private memory in a group whose ranks share memory: the rows
// pass tile by tile through scratch that peers read in place [Note: private memory in tiles].
//
// In the step of tile t a rank sums its window of tile t from everybody's scratch, takes the totals
// of tile t - 1 from where their owners left them, and copies its rows of tile t + 1 into its own.
// All ranks meet between two steps, so two buffers do.
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
  // After group.open_scratch(). Borrows `args`.
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
  // The result of the whole call: the last totals are there, and what is not finite is known.
  void complete();

  // The window in a rank's scratch. A rank's own holds no row, but its total.
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
