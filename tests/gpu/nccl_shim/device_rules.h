// The rules about GPUs: during a call the communicator's device is the current one, and the stream
// belongs to that device and is not being captured. Nothing here waits for a GPU.
#pragma once

#include <string>

#include "communicators.h"

namespace hsdp::nccl_shim {

[[nodiscard]] int current_device();  // -1: the runtime reports none
void check_device(const std::string& call, const Seat& on);
void check_stream(const std::string& call, const Seat& on, void* stream);

}  // namespace hsdp::nccl_shim
