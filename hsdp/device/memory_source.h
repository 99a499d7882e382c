// GPUs' memory beside a framework that keeps memory of its own, as torch's caching allocator does.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "hsdp/tensor_view.h"

namespace hsdp {

// Called on threads of the library too, but never in a task of a stream, and with no lock held that
// the thread of a caller may wait for. What `allocate` throws, an Error, is that of the allocation
// when it has thrown twice.
struct MemorySource {
  // Memory for long, of any content, for work on `stream`, a cudaStream_t; freed with the last copy
  // when that work is done. Null: take the driver's.
  std::function<std::shared_ptr<std::byte>(Device device, std::size_t size, void* stream)> allocate;
  // Gives the driver what is not in use; then an allocation that failed is tried once more.
  std::function<void(Device device)> give_back_unused;
};

// For all allocations from now on. Scratch comes from a pool of the library's, and what is
// registered with NCCL from NCCL; these too are tried again. Thread-safe.
void set_memory_source(MemorySource source);
[[nodiscard]] std::shared_ptr<const MemorySource> memory_source();

}  // namespace hsdp
