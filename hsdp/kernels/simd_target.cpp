#include "hsdp/kernels/simd_target.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>

// First of the Highway headers.
#include "hsdp/kernels/highway_targets.h"
// clang-format off
#include <hwy/highway.h>
// clang-format on

#include "hsdp/error.h"
#include "hsdp/kernels/simd_dispatch.h"

namespace hsdp::kernels {
namespace {

struct NamedTarget {
  std::int64_t bit = 0;  // 0: scalar
  std::string name;
};

std::string lower_case_name(std::int64_t bit) {
#if HWY_ARCH_X86
  if (bit == HWY_AVX3) return "avx512";
#endif
  std::string text = hwy::TargetName(bit);
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

const std::vector<NamedTarget>& named_targets() {
  static const std::vector<NamedTarget> targets = [] {
    std::vector<NamedTarget> list;
    std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS & ~(HWY_SCALAR | HWY_EMU128);
    for (; rest != 0; rest &= rest - 1) {
      const std::int64_t bit = rest & -rest;  // lower bits are better targets
      list.push_back({bit, lower_case_name(bit)});
    }
    list.push_back({0, "scalar"});
    return list;
  }();
  return targets;
}

void use(SimdChoice& choice, std::string_view name, const std::string& who) {
  std::string known;
  const std::vector<NamedTarget>& targets = named_targets();
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (name == targets[i].name) {
      choice.index = i;
      choice.scalar = targets[i].bit == 0;
      if (targets[i].bit != 0) choice.target.Update(targets[i].bit);
      return;
    }
    known += (known.empty() ? "" : ", ") + targets[i].name;
  }
  throw UsageError(who + ": unknown SIMD target: expected one of " + known +
                   " on this machine, got '" + std::string(name) + "'");
}

}  // namespace

SimdChoice& simd_choice() {
  // If the initialiser throws, the next call tries again, so a wrong variable stays an error.
  static SimdChoice choice;
  static const bool chosen = [] {
    const char* const wanted = std::getenv("HSDP_KERNELS");
    std::string_view name = named_targets().front().name;
    if (wanted != nullptr && *wanted != '\0') name = wanted;
    use(choice, name, "HSDP_KERNELS");
    return true;
  }();
  static_cast<void>(chosen);
  return choice;
}

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (const NamedTarget& target : named_targets()) names.push_back(target.name);
  return names;
}

std::string simd_target() { return named_targets()[simd_choice().index].name; }

void force_simd_target(std::string_view name) { use(simd_choice(), name, "kernels"); }

}  // namespace hsdp::kernels
