// A replica hop that sends 4 or 8 bits an element and feeds back what rounding leaves over.
//
// h = g + e; q = quantize(h); d = dequantize(q); e <- beta e + (1 - beta)(h - d), on the way to the
// owners of the groups, and again with an error of its own on the way back. g is the mean gradient:
// the shard sum times 1 / (f s). So what is sent adds up to what was given, but for what is still
// in the errors: sum(d) = sum(g) - (e_K - e_0) / (1 - beta). Every replica ends with the same bits.
//
// LoCo (Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", TPAMI
// 2025, arXiv 2407.04480); docs/loco.md says what differs, how to choose the options, and when it
// pays; docs/quant_format.md has the bytes.
//
// Errors are kept by parameter and place, 1.0625 bytes for each element of a slice and 1.0625 / R
// for the way back (int8, groups of 64), twice: for the last clean step and the one under way. A
// step that is dropped or overflows leaves no trace in them. They count optimizer steps.
//
// Threads and ownership are those of ReplicaHop; the calls that it does not have come between
// steps, on the thread that drives the owner.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/replica_hop.h"
#include "quant/loco_options.h"

namespace hsdp::quant {

class LocoHop final : public ReplicaHop {
 public:
  // UsageError where an option cannot be used.
  explicit LocoHop(LocoOptions options = {});
  ~LocoHop() override;
  LocoHop(const LocoHop&) = delete;
  LocoHop& operator=(const LocoHop&) = delete;

  [[nodiscard]] const LocoOptions& options() const;
  // Clean steps so far.
  [[nodiscard]] std::int64_t steps() const;
  // Multiplies all errors by a finite factor, the same on every rank, where a step was clipped much
  // harder than usual: else they deliver the unclipped rest of a spike over the next steps.
  void scale_errors(float factor);

  // ReplicaHop
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string word() const override;
  [[nodiscard]] std::optional<Dtype> wire() const override;
  [[nodiscard]] bool quantizes() const override { return true; }
  [[nodiscard]] std::int64_t slice_multiple() const override;
  [[nodiscard]] int bucket_class(const HopParameter& parameter) const override;
  void prepare(const HopPlan& plan) override;
  void bind(Communicator scatter, Communicator gather) override;
  [[nodiscard]] bool means(int bucket, float mean_divisor) const override;
  Event reduce(const HopBucket& bucket, Stream& stream) override;
  void end_step(const StepEnd& end) override;
  // "steps" of the hop, and of every parameter "codes" and "scales" or "values", and the same under
  // "gather/" for what this replica owns of the gathered half. Of an owner that is set up.
  [[nodiscard]] std::vector<HopState> state() override;
  // A state of the same parameters, options and replica count; other buckets will do where they
  // leave the gathered half with the same replicas. UsageError otherwise, and nothing has changed.
  void load_state(std::span<const HopState> state) override;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp::quant
