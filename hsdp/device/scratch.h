// Memory for the length of a few calls inside a task of a stream.
//
// Any content. On CUDA it comes from a pool and goes back in stream order, so it may die while the
// work that uses it is still queued; nothing waits. Throws Error when there is no memory.
#pragma once

#include <cstddef>
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

}  // namespace hsdp
