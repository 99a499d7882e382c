// Names what this thread does, for a profiler that reads NVTX (Nsight Systems). Ranges of a thread
// nest. Builds with CUDA have it; without a profiler, and in other builds, nothing happens.
// Thread-safe.
#pragma once

namespace hsdp::profiler {

// Whether somebody reads ranges: otherwise a text need not be made.
[[nodiscard]] bool is_watching();
// From the first call to the second one. `text` is copied.
void push(const char* text);
void pop();

}  // namespace hsdp::profiler
