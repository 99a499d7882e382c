// Takes GPU memory from a framework's allocator, such as torch's caching allocator.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "hsdp/tensor_view.h"

namespace hsdp {

// The library's own threads call it, too, but never inside a task of a stream or while holding a
// lock that a caller's thread may wait for. If `allocate` throws an Error twice, the allocation
// fails with that Error.
struct MemorySource {
  // Long-lived memory with undefined content, for work on `stream`, a cudaStream_t. Freed with the
  // last copy, once that work is done. Null: use the driver's memory.
  std::function<std::shared_ptr<std::byte>(Device device, std::size_t size, void* stream)> allocate;
  // Returns unused memory to the driver; a failed allocation is then retried once.
  std::function<void(Device device)> give_back_unused;
};

// Sets the source of all later allocations. Scratch still comes from the library's own pool, and
// memory registered with NCCL from NCCL; these are retried, too. Thread-safe.
void set_memory_source(MemorySource source);
[[nodiscard]] std::shared_ptr<const MemorySource> memory_source();

}  // namespace hsdp
