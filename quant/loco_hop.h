// A replica hop that sends 4 or 8 bits per element and feeds the rounding error back.
//
// h = g + e; q = quantize(h); d = dequantize(q); e <- beta e + (1 - beta)(h - d), on the way to the
// owners of the groups, and again with a separate error on the way back. g is the mean gradient:
// the shard sum times 1 / (f s). What is sent adds up to what was given, except for what the errors
// still hold: sum(d) = sum(g) - (e_K - e_0) / (1 - beta). Every replica ends with the same bits. If
// results are sharded over the mesh, each replica keeps the sum of its part, and nothing is sent
// back.
//
// LoCo (Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", TPAMI
// 2025, arXiv 2407.04480). docs/loco.md says what differs, how to choose the options, and when it
// pays; docs/quant_format.md describes the bytes.
//
// Errors are kept by parameter and place: 1.0625 bytes per element of a slice, plus 1.0625 / R for
// the way back (int8, groups of 64). There are two copies: the last clean step's and the current
// one's. Dropped or overflowed steps do not change the errors.
//
// Threads and ownership are those of ReplicaHop; call the methods that ReplicaHop lacks between
// steps, on the thread that drives the owner. Another owner may take over the hop with its errors;
// UsageError if that owner is another replica, or has other parts of the same parameters.
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
  // Throws UsageError for an invalid option.
  explicit LocoHop(LocoOptions options = {});
  ~LocoHop() override;
  LocoHop(const LocoHop&) = delete;
  LocoHop& operator=(const LocoHop&) = delete;

  [[nodiscard]] const LocoOptions& options() const;
  // The number of clean steps so far.
  [[nodiscard]] std::int64_t steps() const;
  // Multiplies all errors by `factor`, of magnitude at most 1 and the same on every rank. Call it
  // when a step was clipped much harder than usual: otherwise the errors deliver the unclipped rest
  // of the spike over the next steps.
  void scale_errors(float factor);
  // How much quantization changed the gradients on this rank, in the last clean step with figures;
  // these are taken every error_every steps. The first value above kHighError is also reported on
  // stderr, once per hop.
  [[nodiscard]] std::vector<QuantizationError> quantization_error() const;
  static constexpr double kHighError = 0.3;

  // ReplicaHop
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string word() const override;
  [[nodiscard]] std::optional<Dtype> wire() const override;
  [[nodiscard]] bool quantizes() const override { return true; }
  [[nodiscard]] bool scatters() const override { return true; }
  [[nodiscard]] bool needs_gather_group() const override;
  [[nodiscard]] std::int64_t slice_multiple() const override;
  [[nodiscard]] int bucket_class(const HopParameter& parameter) const override;
  [[nodiscard]] HopNeed need(const HopPlan& plan) const override;  // after the warm-up
  void prepare(const HopPlan& plan) override;
  void bind(Communicator scatter, Communicator gather) override;
  void set_unused() override;  // discards all errors
  [[nodiscard]] bool means(int bucket, double mean_divisor) const override;
  Event reduce(const HopBucket& bucket, Stream& stream) override;
  void end_step(const StepEnd& end) override;
  // docs/loco.md describes keys and arrays. Empty before bind(), unless a state was loaded. With
  // one replica, only the keys of the whole hop.
  [[nodiscard]] std::vector<HopState> state() override;
  // Accepts a state of any replica count, shard count, group size, error_dtype or err_beta that
  // contains this rank's parameters. If counts, buckets or owners differ, it needs all ranks'
  // states. The same replicas, groups and dtype continue with the same bits. Before bind(), the
  // state is kept until then. Throws UsageError, and changes nothing, during a step or if the state
  // does not fit. Unless `strict`, missing parameters start from zero and unknown ones are ignored.
  void load_state(std::span<const HopState> state) override { load_state(state, true); }
  void load_state(std::span<const HopState> state, bool strict);
  // `keys`: the keys of a state saved by all ranks, with element counts. Returns those that this
  // rank's load_state() needs; all of them before bind().
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
