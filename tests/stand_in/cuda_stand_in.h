// What tests tell the stand-in for the CUDA runtime [Note: a stand-in for the runtime]. See
// cuda/cuda_runtime.h.
#pragma once

#include <cstdint>
#include <string>

namespace hsdp::stand_in {

// How many GPUs there are (at the start: 2), and with which error counting them fails (0: none).
void set_devices(int count, int error = 0);

// From now on the call of that name returns `error`; 0: it works again.
void fail(const std::string& call, int error);

// While it lives, no stream of any GPU gets on: whoever waits for one hangs.
class Standstill {
 public:
  Standstill();
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;
};

// Since the start of the process.
[[nodiscard]] std::int64_t kernel_launches();
// Device memory that was allocated and not freed yet; frees happen in stream order.
[[nodiscard]] std::int64_t allocated_bytes();
// The calling thread's current device.
[[nodiscard]] int current_device();

}  // namespace hsdp::stand_in
