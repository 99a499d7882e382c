// AdamW over this rank's slices of a Reducer's parameters: stages 1 and 2 of ZeRO, for loops in
// C++.
//
//   zero::AdamW optimizer(reducer, {{.name = "w", .slice = own}}, {.weight_decay = 0.1});
//   for (...) {
//     ... a step ...
//     gather.fence(stream);
//     optimizer.update(stream);             // by reducer.shard("w")
//     gather.start_all(stream.record());
//   }
//
// A slice is fp32: this rank's part of an fp32 parameter, or a master of a 16-bit one, which
// zero::ParameterGather rounds. Use another optimizer for parameters with other options.
//
// Update number t computes in fp64, and narrows each of these to fp32 once:
//   a = 1 - beta1    b = beta2    c = 1 - beta2    e = epsilon    k = 1 - lr * weight_decay
//   r = lr / (1 - beta1^t)    s = sqrt(1 - beta2^t)        the powers by repeated multiplication
// and for each element in fp32, every operation rounded once and never contracted:
//   g = gradient * grad_factor
//   m = m + (g - m) * a
//   v = v * b + (g * g) * c
//   p = p * k - r * (m / (sqrt(v) / s + e))
// So the bits do not depend on SIMD width, slicing or device, except those of NaN. With u = 2^-24
// and d = sqrt(v') / s + e, one update of the same p, m, v and g differs from fp64 by at most
//   2u |p| + u |p'| + r / d * (3u |g - m| a + 10u |m'|)
// and terms of second order, if nothing underflows or overflows.
//
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; the update of
// torch.optim.AdamW. Factor and skipping are as in its fused form.
//
// Ownership: the Reducer and the slices outlive the optimizer; the optimizer outlives its work on
// streams.
// Memory: 8 bytes per element of the slices, counted in optimizer_bytes of the Reducer's stats().
// Threads: one at a time.
// Streams: an update runs on the given stream and must be over before the Reducer's next step
// begins. On CUDA that holds by itself for an update on the stream of Reducer::set_stream. Only
// steps() and set_steps() wait for the GPU.
// Collective: construction, which prepares the Reducer. Everything else is local.
// Errors: UsageError for options out of range, slices that do not fit, a stream of another device,
// and as Reducer::shard. After one nothing has changed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/device/stream.h"
#include "hsdp/reducer.h"
#include "hsdp/tensor_view.h"
#include "zero/adamw_options.h"

namespace hsdp::zero {

struct AdamWParameter {
  std::string name{};  // as registered
  TensorView slice{};  // f32, of reducer.slice(name)'s count
};

// Numbers in memory of the stream's device, which the update's work reads there.
struct AdamWUpdate {
  const float* grad_factor = nullptr;  // multiplies all gradients: clips without a separate pass
  // As Reducer::found_inf writes it. 1: parameters, moments and the count of steps do not change.
  const float* found_inf = nullptr;
};

// The moments of one slice, in f32, to save and to load.
struct AdamWMoments {
  TensorView first{};
  TensorView second{};
};

class AdamW {
 public:
  AdamW(Reducer& reducer, std::vector<AdamWParameter> parameters, const AdamWOptions& options = {});
  ~AdamW();
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  // The size of the moments of a slice with that many elements.
  [[nodiscard]] static std::int64_t moment_bytes(std::int64_t slice_count);

  // Updates by the gradients of the finished step.
  void update(Stream& stream, const AdamWUpdate& how = {});

  void set_learning_rate(double lr);  // from the next update on
  [[nodiscard]] const AdamWOptions& options() const;

  [[nodiscard]] AdamWMoments moments(std::string_view name) const;
  // The number of updates that were not skipped. Waits for the stream.
  [[nodiscard]] std::int64_t steps(Stream& stream) const;
  void set_steps(std::int64_t steps, Stream& stream);  // after loading moments

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp::zero
