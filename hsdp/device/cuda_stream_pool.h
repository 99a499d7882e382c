// The library's own GPU streams. They have the highest priority and are never destroyed: an
// allocator that knows one (through torch's record_stream) uses it whenever it frees that memory,
// even long after the stream's last work. Internal to hsdp/device.
#pragma once

#include "hsdp/tensor_view.h"

namespace hsdp {

// Returns an idle pooled stream, or a new one. The stream does not synchronize with the legacy
// default stream, which frameworks use. `device` must be current.
[[nodiscard]] void* take_cuda_stream(Device device);  // a cudaStream_t
// Work already enqueued still runs to completion.
void return_cuda_stream(Device device, void* stream) noexcept;

}  // namespace hsdp
