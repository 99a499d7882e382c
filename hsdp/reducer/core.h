// The state machine behind Reducer. docs/design.md [Note: states of a Reducer] draws it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/frozen.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/step_agreement.h"
#include "hsdp/reducer/step_ledger.h"
#include "hsdp/snapshot.h"

namespace hsdp {

class Reducer::Core {
 public:
  Core(const Mesh& mesh, ReducerOptions options);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  int register_parameter(const ParameterSpec& spec);
  void set_requires_gradient_sync(bool flag, const std::optional<std::string>& group);
  void set_requires_all_reduce(bool flag, const std::optional<std::string>& group);
  void set_gradient_divide_factor(std::optional<double> factor);
  void set_loss_scale(double scale);

  void begin_step();
  void begin_microbatch(const MicrobatchOptions& options);
  void set_stream(const Stream& stream);
  void gradient_ready(int parameter, const StridedView& gradient, reducer::GradientOwner owner,
                      const std::optional<Event>& produced);
  [[nodiscard]] Event packed();
  [[nodiscard]] std::vector<Stream> pack_streams() const;
  void reject_gradient(std::string_view message);
  void end_microbatch();
  void abandon_step(std::string_view reason) noexcept;
  void finish();
  void discard();
  void close();

  [[nodiscard]] int find(std::string_view name) const { return parameters_.find(name); }
  // As find(); an unknown name is this rank's fault in the open microbatch.
  [[nodiscard]] int find_in_microbatch(std::string_view name);
  [[nodiscard]] TensorView shard(int parameter);
  [[nodiscard]] std::vector<float> partial_shard(int parameter);
  void partial_shard(int parameter, TensorView out);
  [[nodiscard]] Slice slice(int parameter);
  [[nodiscard]] const std::vector<ParameterSpec>& parameters() const { return parameters_.specs(); }
  void gather_gradients(std::span<const NamedArray> arrays);
  void gather_parameters(std::span<const NamedArray> arrays);
  [[nodiscard]] double squared_norm();  // of the whole mean gradient; collective
  void squared_norm(double* sum);       // the same on a GPU, in stream order
  void grad_norm(TensorView out);
  void scale_shards(double multiplier);
  void scale_shards(const float* factor);  // on a GPU
  [[nodiscard]] const Stream& caller() const { return caller_; }
  // UsageError unless a result of `count` elements may be written to `out`.
  void require_output(const TensorView& out, Dtype dtype, std::int64_t count,
                      std::string_view call) const;
  [[nodiscard]] bool found_inf();
  void found_inf(TensorView out);
  void save_snapshot(const std::filesystem::path& path, std::int64_t step);
  void flush_snapshots();
  [[nodiscard]] ReducerStats stats() const;
  [[nodiscard]] ReducerState state() const;

 private:
  using Phase = reducer::StepLedger::Phase;
  using Holds = reducer::StepLedger::Holds;
  using Plan = std::shared_ptr<const reducer::MicrobatchPlan>;
  void compare_options();  // core_comparison.cpp

  // core.cpp
  void freeze();
  void check_usable(std::string_view call);  // rethrows what went wrong, or closed
  void raise_failure(std::string_view call);
  void raise_drop();
  [[nodiscard]] std::optional<int> find_group(const std::optional<std::string>& group);

  // core_step.cpp
  void open(reducer::MicrobatchPlan plan);
  void prepare(reducer::MicrobatchPlan plan);
  void order_packs();
  void close_collection(std::string_view call);
  void close_local_collection();
  // Tells all ranks that this one drops the step. `sends`: what they still wait for in the open
  // microbatch.
  void drop_step(const std::string& reason, bool sends);
  void forget_step();
  void wait_for_words();
  void wait_until_judged();
  [[nodiscard]] std::int64_t post(std::string_view call, const reducer::MicrobatchPlan& plan,
                                  const std::string& reason, bool sends);
  void end_words(std::int64_t word, const reducer::MicrobatchPlan& plan);
  void note_fault(const std::string& message);
  [[nodiscard]] std::string missing_message() const;
  void check_gradient(int parameter, const StridedView& gradient) const;

  // core_results.cpp
  void wait_idle();
  using Scope = reducer::BucketPipeline::Scope;
  void run_on_device(const std::function<void(Stream&)>& task, Scope scope = Scope::kThisRank);
  void require_idle(std::string_view call);
  void require_result(std::string_view call);
  void require_step_over(std::string_view call);
  void require_no_local_sums(std::string_view call) const;
  void require_partial();
  void sum_squares(double* sum, Stream& stream);
  [[nodiscard]] std::vector<SnapshotEntry> snapshot_entries() const;
  [[nodiscard]] std::vector<std::byte> copy_to_host(std::vector<SnapshotEntry>& entries);

  Mesh mesh_;
  ReducerOptions options_;
  reducer::ParameterTable parameters_;
  reducer::StepLedger ledger_;
  Communicator world_;
  Communicator shard_group_;
  Communicator replicate_group_;
  std::string snapshot_id_;  // random, the same on every rank

  Stream caller_;  // on which the caller reads results and writes gradients
  std::shared_ptr<reducer::StepResult> result_ = std::make_shared<reducer::StepResult>();
  Plan plan_;                // of the open microbatch
  bool zeros_sent_ = false;  // of a dropped step, since the last one began
  std::int64_t all_gather_count_ = 0;
  mutable std::int64_t peak_resident_bytes_ = 0;

  std::optional<reducer::Outcome> outcome_;
  std::optional<reducer::StepAgreement> agreement_;
  std::unique_ptr<reducer::Frozen> frozen_;
  SnapshotWriter snapshots_;
};

}  // namespace hsdp
