// Moves bytes inside a task of a stream, between any two memories that its device reaches.
#pragma once

#include <cstddef>

#include "hsdp/device/stream.h"

namespace hsdp {

// Host stream: done when it returns. CUDA: enqueued; a copy from or to pageable host memory may
// block the caller until the GPU has reached it.
void copy_bytes(void* to, const void* from, std::size_t size, const Stream& stream);

}  // namespace hsdp
