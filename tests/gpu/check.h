// Checks of what runs on a GPU, without a test framework: they also run where only a compiler is.
//
// tests/stand_in runs the same checks on the stand-in for the CUDA runtime.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "hsdp/device/stream.h"

namespace hsdp::gpu {

struct Check {
  std::string name;
  std::function<std::string(Stream)> run;  // on a stream of the GPU; what is wrong, or nothing
};

enum class Effort { kQuick, kFull };  // a CPU in a GPU's place, or a GPU

[[nodiscard]] std::vector<Check> device_checks();
[[nodiscard]] std::vector<Check> pack_checks(Effort effort);
[[nodiscard]] std::vector<Check> sum_checks(Effort effort);
[[nodiscard]] std::vector<Check> norm_checks(Effort effort);
[[nodiscard]] std::vector<Check> quantize_checks(Effort effort);
[[nodiscard]] std::vector<Check> adamw_checks(Effort effort);

// All of them.
[[nodiscard]] std::vector<Check> all_checks(Effort effort);

}  // namespace hsdp::gpu
