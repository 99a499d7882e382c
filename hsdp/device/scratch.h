// Memory for the length of a few calls inside a task of a stream.
//
// Any content. On CUDA it comes from a pool and goes back in stream order, so it may die while the
// work that uses it is still queued; nothing waits. Throws Error when there is no memory, which is
// not so while all scratch of a device is no more than what was reserved.
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

// As the pool counts one piece of scratch.
constexpr std::size_t scratch_size(std::size_t bytes) {
  constexpr std::size_t kGranularity = 512;
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

// Keeps memory for the scratch of whoever holds it, so that a step does not run out of it half way.
// Nothing on the host. Throws Error when there is no memory.
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
