// What tests tell the stand-in for the CUDA runtime [Note: a stand-in for the runtime]. See
// cuda/cuda_runtime.h.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace hsdp::stand_in {

// How many GPUs there are (at the start: 2), and with which error counting them fails (0: none).
void set_devices(int count, int error = 0);

constexpr int kAlways = std::numeric_limits<int>::max();  // times

// Which calls of that name fail with `error`: the one after so many more, and the next up to
// `times`, of the threads whose current device that is.
struct FailingCall {
  std::string name;
  int error = 0;
  std::int64_t after = 0;
  int times = 1;
  std::optional<int> device{};
};
void fail_call(std::optional<FailingCall> which);  // none: no longer
// Since the start of the process.
[[nodiscard]] std::int64_t call_count(const std::string& name, int device);
[[nodiscard]] std::map<std::string, std::int64_t> call_counts(int device);  // by name

// Which allocations fail: the one after so many more, and the next up to `times`, of the threads
// whose current device that is. It counts where a pool has to grow, and for pinned memory: what a
// pool keeps it gives out again.
struct FailingAllocation {
  std::int64_t after = 0;
  int times = 2;  // the library tries again once
  std::optional<int> device{};
};
void fail_allocation(std::optional<FailingAllocation> which);  // none: no longer
[[nodiscard]] std::int64_t allocation_count();  // since the start, those that failed too

// A kernel has failed: every call returns `error`, and what is in the streams does not run, until 0
// makes a new process of it.
void break_devices(int error);
// The kernel of that device, the one after so many more, fails when its turn has come. It breaks
// that device only: ranks with a GPU each, which are processes elsewhere, are threads here.
struct FailingKernel {
  int device = 0;
  std::int64_t after = 0;
};
void fail_kernel(std::optional<FailingKernel> which);  // none: no longer

// Each piece of work waits for a random time first, up to a millisecond; none: no longer.
void delay_work(std::optional<std::uint64_t> seed);

// While it lives, no stream of any GPU gets on: whoever waits for one hangs.
class Standstill {
 public:
  Standstill();
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;
};

// Begin and end the capture of a stream into a graph, in global or thread-local mode: whether that
// succeeds.
[[nodiscard]] bool begin_capture(void* stream, bool of_all_threads);
[[nodiscard]] bool end_capture(void* stream);

// Since the start of the process.
[[nodiscard]] std::int64_t kernel_launches();
// Device memory that was allocated and not freed yet; frees happen in stream order.
[[nodiscard]] std::int64_t allocated_bytes();
// The calling thread's current device.
[[nodiscard]] int current_device();
// Devices on which this process has a context, which is hundreds of megabytes.
[[nodiscard]] std::set<int> contexts();
void forget_contexts();  // as in a new process

}  // namespace hsdp::stand_in
