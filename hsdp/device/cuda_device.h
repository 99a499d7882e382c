// What a GPU build provides behind the classes of this folder. no_cuda.cpp takes its place in a
// build without CUDA: every call throws a UsageError that names the CMake option. With CUDA, a
// machine without a driver or without that device gets a UsageError that says so. Internal to
// hsdp/device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hsdp/device/stream.h"

namespace hsdp {

// A queue that owns a new stream of `device`.
[[nodiscard]] std::shared_ptr<Stream::Queue> make_cuda_queue(Device device,
                                                             const std::string& name);

// A queue on a cudaStream_t of somebody else, who keeps it alive.
[[nodiscard]] std::shared_ptr<Stream::Queue> borrow_cuda_queue(Device device, void* native_handle);

// Zeros, ready for any stream; freed with the last copy, which must not die before the work that
// uses it is done. Error when there is no memory; nullptr for 0 bytes.
[[nodiscard]] std::shared_ptr<std::byte> allocate_cuda(Device device, std::size_t size);

// What allocate_cuda() has given out so far is freed after that Event.
void free_cuda_after(Device device, const Event& event);

// The same with any content, from and back to the pool in the order of `stream`.
[[nodiscard]] std::shared_ptr<std::byte> allocate_cuda_scratch(std::size_t size,
                                                               const Stream& stream);

// Scratch of the device never has to wait for memory while no more than that is in use, beside what
// others reserve. Error when there is no memory.
[[nodiscard]] std::shared_ptr<void> reserve_cuda_scratch(Device device, std::size_t size);

// As allocate_cuda() in pinned memory of the host, which the device reaches at the same address.
[[nodiscard]] std::shared_ptr<std::byte> allocate_cuda_pinned(Device device, std::size_t size);

// A zero word of pinned host memory.
[[nodiscard]] std::shared_ptr<std::atomic<std::uint32_t>> make_cuda_flag(Device device);

void copy_on_cuda(void* to, const void* from, std::size_t size, const Stream& stream);

}  // namespace hsdp
