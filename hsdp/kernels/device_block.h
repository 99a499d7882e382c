// The threads of one CUDA block, as kernel bodies see them. On the host the same calls loop over
// the threads, so that tests run the same bodies as a GPU. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/dtype.h"

namespace hsdp::kernels {

class Block {
 public:
  static constexpr int kThreads = 256;

  HSDP_HOST_DEVICE Block(std::int64_t index, std::int64_t count) : index_(index), count_(count) {}

  // Runs visit(thread) for every thread; all have finished when it returns.
  template <class Visit>
  HSDP_HOST_DEVICE void each_thread(const Visit& visit) const {
#if defined(__CUDA_ARCH__)
    visit(static_cast<int>(threadIdx.x));
    __syncthreads();
#else
    for (int thread = 0; thread < kThreads; ++thread) visit(thread);
#endif
  }

  // Sets `flag` to 1 if `raised`. All threads of a warp must call it together.
  HSDP_HOST_DEVICE void raise(bool raised, std::uint32_t* flag) const {
    if (flag == nullptr) return;
#if defined(__CUDA_ARCH__)
    // One write per warp: the word lies in host memory.
    const bool any = __any_sync(0xffffffffU, raised) != 0;
    if (any && threadIdx.x % 32 == 0) set(flag);
#else
    if (raised) set(flag);
#endif
  }

  // `flag` lies in host memory; other threads may be reading or writing it.
  HSDP_HOST_DEVICE void set(std::uint32_t* flag) const {
#if defined(__CUDA_ARCH__)
    *static_cast<volatile std::uint32_t*>(flag) = 1;
#else
    __atomic_store_n(flag, 1U, __ATOMIC_RELEASE);
#endif
  }
  [[nodiscard]] HSDP_HOST_DEVICE std::uint32_t read(const std::uint32_t* word) const {
#if defined(__CUDA_ARCH__)
    return *static_cast<const volatile std::uint32_t*>(word);
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
  }

  // Raises *most, a word in shared memory, to at least `value`. Several threads may do so at once.
  HSDP_HOST_DEVICE void raise_to(std::uint32_t value, std::uint32_t* most) const {
#if defined(__CUDA_ARCH__)
    atomicMax(most, value);
#else
    if (value > *most) *most = value;
#endif
  }
  HSDP_HOST_DEVICE void add(double value, double* sum) const {
#if defined(__CUDA_ARCH__)
    atomicAdd(sum, value);
#else
    *sum += value;
#endif
  }
  HSDP_HOST_DEVICE void add(std::uint64_t value, std::uint64_t* sum) const {
#if defined(__CUDA_ARCH__)
    static_assert(sizeof(unsigned long long) == sizeof *sum);
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
#else
    *sum += value;
#endif
  }

  [[nodiscard]] HSDP_HOST_DEVICE std::int64_t index() const { return index_; }
  [[nodiscard]] HSDP_HOST_DEVICE std::int64_t count() const { return count_; }
  // The rank of `thread` among the threads of all blocks, and the number of those threads.
  [[nodiscard]] HSDP_HOST_DEVICE std::int64_t rank(int thread) const {
    return index_ * kThreads + thread;
  }
  [[nodiscard]] HSDP_HOST_DEVICE std::int64_t size() const { return count_ * kThreads; }

 private:
  std::int64_t index_;
  std::int64_t count_;
};

}  // namespace hsdp::kernels
