// The fp32 sums of rows that a RowReducer keeps by group. Knows when the work on its callers'
// streams is done, and whether it met a non-finite value. One call at a time. On the host every
// call completes before it returns.
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

  // The group's sum = row, plus the sum so far if it `adds`.
  void keep(std::size_t group, const TensorView& row, bool adds, Stream stream);
  // total = row, plus the group's sum if it `adds`. The row may be without data. Comes after all
  // earlier work, on any stream.
  void add_up(std::size_t group, const TensorView& row, bool adds, const TensorView& total,
              Stream& stream);
  // Notes the event of the hop's work on a total.
  void follow(const Event& hop, Stream& stream);
  // No more work on this total will be enqueued.
  void close_total(std::size_t group, Stream& stream);

  [[nodiscard]] std::atomic<std::uint32_t>* nonfinite() { return nonfinite_.get(); }
  // Waits until all work is done. Throws what has ended the world, which may be an error of that
  // work.
  void wait();
  // The same even after the world's end, before the memory is freed.
  void drain() noexcept;
  // Waits, and returns whether a value was not finite since the last call.
  [[nodiscard]] bool take_nonfinite();

  void release(std::size_t group) { sums_[group].memory = {}; }  // after wait()
  [[nodiscard]] std::int64_t bytes(std::size_t group) const;

 private:
  struct Sum {
    Buffer memory;
    Event written;  // or read, on any stream
  };

  Groups ranks_;
  Outcome& outcome_;
  std::vector<Sum> sums_;
  Flag nonfinite_;
  Event totals_;                  // the work on totals so far
  std::vector<Event> late_hops_;  // on a GPU: their errors are read later
};

}  // namespace hsdp::reducer
