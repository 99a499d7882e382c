// The errors that a hop keeps from step to step, for some windows of its buckets: those of the last
// clean step, and beside them those of the step under way. Each window is written apart, so a step
// that reduces only some of them leaves the rest alone.
//
// Memory is taken when it is made. Not thread-safe: before() and after() on the thread that
// enqueues reductions, the rest between steps.
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
  struct Extent {  // of a window, at most
    std::int64_t elements = 0;
    std::int64_t groups = 0;
  };
  // `dtype`: u8 for int8 codes with fp32 scales, or f32.
  ErrorStates(Dtype dtype, const std::vector<Extent>& windows, Device device);
  // Bytes of one of the two.
  [[nodiscard]] static std::int64_t bytes(Dtype dtype, const std::vector<Extent>& windows);

  struct Step {
    ErrorState before;
    ErrorState after;
  };
  // Of a window's next reduction in this step: a later one goes on from the one before. `cleared`:
  // from zero; enqueues that in `stream`.
  [[nodiscard]] Step next(std::size_t window, bool cleared, const Stream& stream);
  // What the step has written stands, or was never there.
  void commit();
  void drop();
  // After the last clean step.
  [[nodiscard]] ErrorState state(std::size_t window) const;
  // Enqueues zeros for every window that the step has not written: with commit(), all start afresh.
  void clear_unwritten(const Stream& stream);

 private:
  struct Place {
    std::int64_t element = 0;
    std::int64_t group = 0;
    Extent extent;
    std::uint8_t bank = 0;  // where its committed errors are
    bool written = false;   // in the other one, in this step
  };
  [[nodiscard]] ErrorState at(const Place& place, std::size_t bank) const;
  void clear(const Place& place, std::size_t bank, const Stream& stream) const;

  Dtype dtype_;
  std::vector<Place> places_;
  Buffer errors_[2];  // codes or values
  Buffer scales_[2];
};

}  // namespace hsdp::quant
