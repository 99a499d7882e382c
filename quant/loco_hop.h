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
// steps, on the thread that drives the owner. A hop that is given to another owner takes its errors
// along; UsageError if it is another replica there, or has other parts of the same parameters.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hsdp/replica_hop.h"
#include "quant/loco_options.h"
#include "quant/quantization_error.h"

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
  // Multiplies all errors by a factor of magnitude at most 1, the same on every rank, where a step
  // was clipped much harder than usual: else they deliver the unclipped rest of a spike over the
  // next steps.
  void scale_errors(float factor);
  // How much quantization has changed the gradients of a step, on this rank: of the last clean one
  // of those that figures were taken in, every error_every steps. Above kHighError it is written
  // to stderr, too, once for each hop.
  [[nodiscard]] std::vector<QuantizationError> quantization_error() const;
  static constexpr double kHighError = 0.3;

  // ReplicaHop
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string word() const override;
  [[nodiscard]] std::optional<Dtype> wire() const override;
  [[nodiscard]] bool quantizes() const override { return true; }
  [[nodiscard]] std::int64_t slice_multiple() const override;
  [[nodiscard]] int bucket_class(const HopParameter& parameter) const override;
  void prepare(const HopPlan& plan) override;
  void bind(Communicator scatter, Communicator gather) override;
  void set_unused() override;  // gives up all errors
  [[nodiscard]] bool means(int bucket, double mean_divisor) const override;
  Event reduce(const HopBucket& bucket, Stream& stream) override;
  void end_step(const StepEnd& end) override;
  // docs/loco.md says what keys and arrays mean. Empty before bind(), unless it was loaded; with
  // one replica, what is of the hop as a whole.
  [[nodiscard]] std::vector<HopState> state() override;
  // A state of any replica count, shard count, group size, error_dtype or err_beta, as long as this
  // rank's parameters are in it; with other counts, buckets or owners it takes all ranks' states
  // together. The same replicas, groups and dtype go on with the same bits. Before bind() it is
  // kept until then. UsageError, and nothing has changed, while a step is under way or where it
  // does not fit; not `strict`: parameters it does not have start from zero, others are left out.
  void load_state(std::span<const HopState> state) override { load_state(state, true); }
  void load_state(std::span<const HopState> state, bool strict);
  // Of the keys of a state that all ranks have saved, and their element counts: what this rank's
  // load_state() needs. Before bind(): all.
  struct SavedKey {
    std::string key;
    std::int64_t count = 0;
  };
  [[nodiscard]] std::vector<std::string> keys_to_load(std::span<const SavedKey> keys) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp::quant
