// The fp32 sums of rows that a RowReducer keeps by group, and what it has enqueued on its callers'
// streams: when that is done, and whether a value in it was not finite.
//
// Threads: one call at a time. On the host everything is done when a call returns.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/device/event.h"
#include "hsdp/device/flag.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

class RowSums {
 public:
  // `outcome` outlives it.
  RowSums(const Groups& ranks, std::size_t group_count, Outcome& outcome);

  // The group's sum = (the sum, where it `adds` to one, +) row.
  void keep(std::size_t group, const TensorView& row, bool adds, Stream stream);
  // total = (the group's sum, where it `adds` to one, +) row, which may be without data. After all
  // that was enqueued before, on whatever streams.
  void add_up(std::size_t group, const TensorView& row, bool adds, const TensorView& total,
              Stream& stream);
  // What the hop still does with a total.
  void follow(const Event& hop, Stream& stream);
  // Nothing more of this total is enqueued.
  void close_total(std::size_t group, Stream& stream);

  [[nodiscard]] std::atomic<std::uint32_t>* nonfinite() { return nonfinite_.get(); }
  // Waits until all of it is done. Throws what has ended the world, which may be an error of it.
  void wait();
  // The same after the world's end too, before the memory goes.
  void drain() noexcept;
  // And says whether a value was not finite since it was last asked.
  [[nodiscard]] bool take_nonfinite();

  void release(std::size_t group) { sums_[group].memory = {}; }  // after wait()
  [[nodiscard]] std::int64_t bytes(std::size_t group) const;

 private:
  struct Sum {
    Buffer memory;
    Event written;  // or read, on whatever stream
  };

  Groups ranks_;
  Outcome& outcome_;
  std::vector<Sum> sums_;
  Flag nonfinite_;
  Event totals_;                  // what was enqueued of them so far
  std::vector<Event> late_hops_;  // to be asked for their errors, on a GPU
};

}  // namespace hsdp::reducer
