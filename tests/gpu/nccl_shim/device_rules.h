// The rules about GPUs: a call is made with the communicator's device current, on a stream of that
// device that nobody captures. Nothing here waits for a GPU.
#pragma once

#include <string>

#include "communicators.h"

namespace hsdp::nccl_shim {

[[nodiscard]] int current_device();  // -1: the runtime does not say
void check_device(const std::string& call, const Seat& on);
void check_stream(const std::string& call, const Seat& on, void* stream);

}  // namespace hsdp::nccl_shim
