// The arithmetic of an AdamW update, in the order of adamw.h, for the host and CUDA [Note: one
// source for host and device]. Internal to zero/.
#pragma once

#include <cmath>
#include <cstdint>

#include "hsdp/dtype.h"
#include "zero/adamw_options.h"

namespace hsdp::zero {

// The numbers of one update, for all elements.
struct AdamWNumbers {
  float grad_factor = 1.0F;
  float take1 = 0.0F;    // a
  float beta2 = 0.0F;    // b
  float take2 = 0.0F;    // c
  float root = 1.0F;     // s
  float epsilon = 0.0F;  // e
  float keep = 1.0F;     // k
  float rate = 0.0F;     // r
  std::uint32_t skip = 0;
};

// The counters of an optimizer, in device memory, as only the device knows whether an update was
// skipped. All zero at the start.
struct AdamWClock {
  std::int64_t steps = 0;
  double beta1_power = 0.0;  // to the power of `steps`, from the first one on
  double beta2_power = 0.0;
  AdamWNumbers numbers;
};

struct AdamWTick {
  AdamWOptions options;
  const float* grad_factor = nullptr;
  const float* found_inf = nullptr;
  AdamWClock* clock = nullptr;
};

HSDP_HOST_DEVICE inline void count_step(AdamWClock& clock, const AdamWOptions& options) {
  const bool is_first = clock.steps == 0;
  clock.beta1_power = is_first ? options.beta1 : clock.beta1_power * options.beta1;
  clock.beta2_power = is_first ? options.beta2 : clock.beta2_power * options.beta2;
  ++clock.steps;
}

HSDP_HOST_DEVICE inline void tick(const AdamWTick& args) {
  AdamWClock& clock = *args.clock;
  AdamWNumbers& numbers = clock.numbers;
  numbers.skip = args.found_inf != nullptr && *args.found_inf != 0.0F ? 1 : 0;
  if (numbers.skip != 0) return;
  const AdamWOptions& options = args.options;
  count_step(clock, options);
  numbers.grad_factor = args.grad_factor == nullptr ? 1.0F : *args.grad_factor;
  numbers.take1 = static_cast<float>(1.0 - options.beta1);
  numbers.beta2 = static_cast<float>(options.beta2);
  numbers.take2 = static_cast<float>(1.0 - options.beta2);
  numbers.root = static_cast<float>(std::sqrt(1.0 - clock.beta2_power));
  numbers.epsilon = static_cast<float>(options.epsilon);
  numbers.keep = static_cast<float>(1.0 - options.lr * options.weight_decay);
  numbers.rate = static_cast<float>(options.lr / (1.0 - clock.beta1_power));
}

struct AdamWElement {
  float parameter = 0.0F;
  float first = 0.0F;
  float second = 0.0F;
};

HSDP_HOST_DEVICE inline AdamWElement updated(const AdamWElement& old, float gradient,
                                             const AdamWNumbers& numbers) {
  const float g = gradient * numbers.grad_factor;
  AdamWElement element;
  element.first = old.first + (g - old.first) * numbers.take1;
  element.second = old.second * numbers.beta2 + (g * g) * numbers.take2;
  const float denominator = std::sqrt(element.second) / numbers.root + numbers.epsilon;
  element.parameter = old.parameter * numbers.keep - numbers.rate * (element.first / denominator);
  return element;
}

}  // namespace hsdp::zero
