// The step for which the Reducer and its peer are timed: a replicate x shard mesh, some
// microbatches, and one gradient of `parameter_count` elements that holds bf16 values. The wire is
// bf16 if the program has it. At the end each rank holds its slice of the mean over ranks in fp32.
//
//   bench <system> <variant> step <gradient dtype> <parameter bytes as f32> <ranks> <median_us>
//   <checked>
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

#include "measurement.h"

namespace hsdp::bench {

struct StepCase {
  std::int64_t parameter_count = std::int64_t{64} << 20;
  int replicate_size = 2;
  int shard_size = 2;
  int microbatch_count = 4;
  Dtype gradient_dtype = Dtype::kF32;
  std::string only_variant;  // empty: all
};

inline StepCase step_case(const Arguments& arguments) {
  StepCase step;
  step.parameter_count =
      std::stoll(arguments.value("parameters", std::to_string(step.parameter_count)));
  step.gradient_dtype = arguments.value("gradient", "f32") == "f32" ? Dtype::kF32 : Dtype::kBf16;
  step.only_variant = arguments.value("variant", "");
  return step;
}

// The mean over ranks of the sum over microbatches. All microbatches have the same gradient.
inline double expected_mean(const StepCase& step, std::int64_t index) {
  const int ranks = step.replicate_size * step.shard_size;
  return expected_sum(index, ranks) * step.microbatch_count / ranks;
}

// Whether elements [begin, begin + count) of the mean are right to within `tolerance` times the
// largest possible value. For fp32 sums the tolerance is 0, since they are exact.
inline bool holds_mean(const StepCase& step, const float* slice, std::int64_t begin,
                       std::int64_t count, double tolerance) {
  std::int64_t wrong = 0;
  const double bound = tolerance * step.microbatch_count;
  for (std::int64_t i = 0; i < count; ++i) {
    const double error = std::abs(static_cast<double>(slice[i]) - expected_mean(step, begin + i));
    wrong += error <= bound ? 0 : 1;
  }
  return wrong == 0;
}

inline void report_step(const Group& group, const std::string& variant, const StepCase& step,
                        double time_us, bool checked) {
  if (group.rank != 0) return;
  std::printf("bench %s %s step %s %lld %d %.3f %d\n", group.system.c_str(), variant.c_str(),
              step.gradient_dtype == Dtype::kF32 ? "f32" : "bf16",
              static_cast<long long>(step.parameter_count * 4), group.size, time_us,
              checked ? 1 : 0);
  std::fflush(stdout);
}

// `verify` is called after one run.
inline void measure_step(const Group& group, const std::string& variant, const StepCase& step,
                         const std::function<void()>& run, const std::function<bool()>& verify) {
  const auto right = [&] {
    run();
    return group.max(verify() ? 0.0 : 1.0) == 0.0;
  };
  const bool right_before = right();
  const double time_us = median_us(group, run);
  report_step(group, variant, step, time_us, right() && right_before);
}

}  // namespace hsdp::bench
