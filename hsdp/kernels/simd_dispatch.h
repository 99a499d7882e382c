// HSDP_SIMD_DISPATCH(function): the version of an HWY_EXPORTed function for simd_target().
//
// All users of Highway in a process share Highway's own choice; this choice is ours alone. Include
// after hwy/highway.h. Do not call functions through it when simd_choice().scalar is set.
#pragma once

#include <hwy/targets.h>

#include <atomic>
#include <cstddef>

namespace hsdp::kernels {

struct SimdChoice {
  hwy::ChosenTarget target;
  std::atomic<bool> scalar{false};
  std::atomic<std::size_t> index{0};  // index into simd_targets()
};

// Reads HSDP_KERNELS at the first call; throws like simd_target().
[[nodiscard]] SimdChoice& simd_choice();

}  // namespace hsdp::kernels

#if HWY_IDE || ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0)
#define HSDP_SIMD_DISPATCH(function) HWY_STATIC_DISPATCH(function)
#else
#define HSDP_SIMD_DISPATCH(function) \
  (*(HWY_DISPATCH_TABLE(function)[hsdp::kernels::simd_choice().target.GetIndex()]))
#endif
