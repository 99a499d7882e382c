// Memory for a few calls inside a task of a stream.
//
// Its content is undefined. On CUDA it comes from a pool and returns in stream order, without
// waiting, so it may be destroyed while the work that uses it is still queued. Throws Error when
// there is no memory, which cannot happen while a device's scratch stays within what was reserved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "hsdp/device/stream.h"

namespace hsdp {

class Scratch {
 public:
  Scratch(std::size_t size, const Stream& stream);
  [[nodiscard]] std::byte* data() const { return memory_.get(); }

 private:
  std::shared_ptr<std::byte> memory_;
};

// The size that the pool counts for one piece of scratch.
constexpr std::size_t scratch_size(std::size_t bytes) {
  constexpr std::size_t kGranularity = 512;
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

// Reserves scratch while it lives, so that a step does not run out of memory half way. No effect on
// the host. Throws Error when there is no memory.
class ScratchReserve {
 public:
  ScratchReserve() = default;
  ScratchReserve(Device device, std::size_t size);
  [[nodiscard]] std::int64_t size_bytes() const { return size_bytes_; }

 private:
  std::shared_ptr<void> kept_;
  std::int64_t size_bytes_ = 0;
};

}  // namespace hsdp
