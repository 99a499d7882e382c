// Which SIMD instruction set the kernels use: by default this CPU's best, or the one that the
// environment variable HSDP_KERNELS names (read once). Results have the same bits with all of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hsdp::kernels {

// The targets that this build and this CPU can run, best first, for example avx512, avx2, sse4,
// scalar. The last is always scalar.
[[nodiscard]] std::vector<std::string> simd_targets();

// The target in use. Throws UsageError if HSDP_KERNELS is not in simd_targets().
[[nodiscard]] std::string simd_target();

// Makes the whole process use one of simd_targets() from now on; throws UsageError for any other
// name. For tests and benchmarks. Thread-safe.
void force_simd_target(std::string_view name);

}  // namespace hsdp::kernels
