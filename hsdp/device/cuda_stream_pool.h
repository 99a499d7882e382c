// The library's own streams of a GPU, of the highest priority and never destroyed: an allocator
// that was told of one (torch's record_stream) uses it whenever it frees that memory, even long
// after its last work. Internal to hsdp/device.
#pragma once

#include "hsdp/tensor_view.h"

namespace hsdp {

// One that nobody uses and whose work is done, else a new one. It does not wait for the legacy
// default stream: frameworks run theirs there. The device is current.
[[nodiscard]] void* take_cuda_stream(Device device);  // a cudaStream_t
// Work in it runs to its end.
void return_cuda_stream(Device device, void* stream) noexcept;

}  // namespace hsdp
