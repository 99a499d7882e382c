// Checks of GPU code that use no test framework, so that a compiler is all they need.
//
// tests/stand_in runs the same checks with the stand-in for the CUDA runtime.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "hsdp/device/stream.h"

namespace hsdp::gpu {

struct Check {
  std::string name;
  std::function<std::string(Stream)> run;  // takes a GPU stream; returns what is wrong, or nothing
};

enum class Effort { kQuick, kFull };  // for a CPU that stands in for a GPU, or for a GPU

[[nodiscard]] std::vector<Check> device_checks();
[[nodiscard]] std::vector<Check> pack_checks(Effort effort);
[[nodiscard]] std::vector<Check> sum_checks(Effort effort);
[[nodiscard]] std::vector<Check> norm_checks(Effort effort);
[[nodiscard]] std::vector<Check> quantize_checks(Effort effort);
[[nodiscard]] std::vector<Check> adamw_checks(Effort effort);

[[nodiscard]] std::vector<Check> all_checks(Effort effort);

}  // namespace hsdp::gpu
