// How tests configure the stand-in for the CUDA runtime [Note: a stand-in for the runtime]. See
// cuda/cuda_runtime.h.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace hsdp::stand_in {

// Sets the number of GPUs (2 at the start) and the error with which counting them fails (0: none).
void set_devices(int count, int error = 0);

constexpr int kAlways = std::numeric_limits<int>::max();  // times

// Which calls of that name fail with `error`, on threads whose current device is this one: the call
// after so many others, and following ones up to `times`.
struct FailingCall {
  std::string name;
  int error = 0;
  std::int64_t after = 0;
  int times = 1;
  std::optional<int> device{};
};
void fail_call(std::optional<FailingCall> which);  // none: no call fails any more
// Since the start of the process.
[[nodiscard]] std::int64_t call_count(const std::string& name, int device);
[[nodiscard]] std::map<std::string, std::int64_t> call_counts(int device);  // by name

// Which allocations fail, on threads whose current device is this one: the allocation after so many
// others, and following ones up to `times`. Pinned memory counts, and so does a pool that has to
// grow; memory that a pool reuses does not.
struct FailingAllocation {
  std::int64_t after = 0;
  int times = 2;  // the library tries again once
  std::optional<int> device{};
};
void fail_allocation(std::optional<FailingAllocation> which);  // none: no allocation fails any more
[[nodiscard]] std::int64_t allocation_count();  // since the start, failed ones included

// As if a kernel had failed: every call returns `error`, and no work of the streams runs. 0 stands
// for a new process.
void break_devices(int error);
// A kernel of that device, after so many others, fails when it would run. It breaks only that
// device, as ranks, which would be processes with a GPU each, are threads here.
struct FailingKernel {
  int device = 0;
  std::int64_t after = 0;
};
void fail_kernel(std::optional<FailingKernel> which);  // none: no kernel fails any more

// Each piece of work first waits for a random time of up to a millisecond; none: it no longer does.
void delay_work(std::optional<std::uint64_t> seed);

// While it lives, no stream of any GPU makes progress: a wait for one hangs.
class Standstill {
 public:
  Standstill();
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;
};

// Begin and end the capture of a stream into a graph, in global or thread-local mode. Return
// whether that succeeds.
[[nodiscard]] bool begin_capture(void* stream, bool of_all_threads);
[[nodiscard]] bool end_capture(void* stream);

// Since the start of the process.
[[nodiscard]] std::int64_t kernel_launches();
// Device memory that was allocated and not freed yet; frees happen in stream order.
[[nodiscard]] std::int64_t allocated_bytes();
// The calling thread's current device.
[[nodiscard]] int current_device();
// Devices on which this process has a context. A context takes hundreds of megabytes.
[[nodiscard]] std::set<int> contexts();
void forget_contexts();  // as in a new process

}  // namespace hsdp::stand_in
