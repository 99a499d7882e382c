// The errors that a hop keeps from step to step for some windows of its buckets: those after the
// last clean step, and those of the current step. Windows are independent: a step that reduces only
// some of them does not change the others.
//
// The constructor allocates the memory. Not thread-safe: call next() on the thread that enqueues
// reductions, and everything else between steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/device/stream.h"
#include "hsdp/dtype.h"
#include "quant/quantize.h"

namespace hsdp::quant {

class ErrorStates {
 public:
  struct Extent {  // upper bounds for a window
    std::int64_t elements = 0;
    std::int64_t groups = 0;
  };
  // `dtype`: u8 for int8 codes with fp32 scales, or f32.
  ErrorStates(Dtype dtype, const std::vector<Extent>& windows, Device device);
  // Size in bytes of one copy; there are two.
  [[nodiscard]] static std::int64_t bytes(Dtype dtype, const std::vector<Extent>& windows);

  struct Step {
    ErrorState before;
    ErrorState after;
  };
  // The errors before and after a window's next reduction in this step. Repeated reductions build
  // on each other. `cleared`: start from zero, which this enqueues in `stream`.
  [[nodiscard]] Step next(std::size_t window, bool cleared, const Stream& stream);
  // Keep or discard what the step has written.
  void commit();
  void drop();
  // The errors after the last clean step.
  [[nodiscard]] ErrorState state(std::size_t window) const;
  // Enqueues zeros for every window not written in this step, so that commit() resets them all.
  void clear_unwritten(const Stream& stream);

 private:
  struct Place {
    std::int64_t element = 0;
    std::int64_t group = 0;
    Extent extent;
    std::uint8_t bank = 0;  // holds the committed errors
    bool written = false;   // the other bank, in this step
  };
  [[nodiscard]] ErrorState at(const Place& place, std::size_t bank) const;
  void clear(const Place& place, std::size_t bank, const Stream& stream) const;

  Dtype dtype_;
  std::vector<Place> places_;
  Buffer errors_[2];  // codes or values
  Buffer scales_[2];
};

}  // namespace hsdp::quant
