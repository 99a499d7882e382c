// Which SIMD instruction set the kernels use: by default the best of this CPU, or the one that the
// environment variable HSDP_KERNELS names (read once). The bits of the results do not depend on it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hsdp::kernels {

// What this build and this CPU can run, best first, for example avx512, avx2, sse4, scalar; scalar
// is always the last.
[[nodiscard]] std::vector<std::string> simd_targets();

// The one in use. UsageError when HSDP_KERNELS names none of simd_targets().
[[nodiscard]] std::string simd_target();

// Uses one of simd_targets() in the whole process from now on; UsageError otherwise. For tests and
// benchmarks. Thread-safe.
void force_simd_target(std::string_view name);

}  // namespace hsdp::kernels
