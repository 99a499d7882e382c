// What a GPU build provides behind the classes of this folder. In a build without CUDA, no_cuda.cpp
// replaces it: every call throws a UsageError that names the CMake option. With CUDA but without a
// driver or without that device, calls throw a UsageError that says so. Internal to hsdp/device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hsdp/device/stream.h"

namespace hsdp {

[[nodiscard]] std::shared_ptr<Stream::Queue> make_cuda_queue(Device device,
                                                             const std::string& name);

// A queue on a borrowed cudaStream_t, whose owner keeps it alive.
[[nodiscard]] std::shared_ptr<Stream::Queue> borrow_cuda_queue(Device device, void* native_handle);

// Zeroed memory, ready for any stream, freed with the last copy. The last copy must outlive the
// work that uses the memory. Throws Error when there is no memory; nullptr for 0 bytes.
[[nodiscard]] std::shared_ptr<std::byte> allocate_cuda(Device device, std::size_t size);

// Defers freeing what allocate_cuda() has returned so far until `event`.
void free_cuda_after(Device device, const Event& event);

// Like allocate_cuda(), but with undefined content; the pool reuses it in the order of `stream`.
[[nodiscard]] std::shared_ptr<std::byte> allocate_cuda_scratch(std::size_t size,
                                                               const Stream& stream);

// Keeps `size` bytes in the device's scratch pool, in addition to other reservations. While no more
// scratch than that is in use, allocating it cannot fail. Throws Error when there is no memory.
[[nodiscard]] std::shared_ptr<void> reserve_cuda_scratch(Device device, std::size_t size);

// Like allocate_cuda(), but in pinned host memory, which the device reaches at the same address.
[[nodiscard]] std::shared_ptr<std::byte> allocate_cuda_pinned(Device device, std::size_t size);

// A zero word of pinned host memory.
[[nodiscard]] std::shared_ptr<std::atomic<std::uint32_t>> make_cuda_flag(Device device);

void copy_on_cuda(void* to, const void* from, std::size_t size, const Stream& stream);

}  // namespace hsdp
