// Copies bytes inside a task of a stream, between any two memories that its device can reach.
#pragma once

#include <cstddef>

#include "hsdp/device/stream.h"

namespace hsdp {

// Host stream: done on return. CUDA: enqueued; a copy from or to pageable host memory may block the
// caller until the GPU has reached it.
void copy_bytes(void* to, const void* from, std::size_t size, const Stream& stream);

}  // namespace hsdp
