// The state machine behind Reducer. docs/design.md [Note: states of a Reducer] draws it.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/frozen.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/status_word.h"
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

  void begin_microbatch(const MicrobatchOptions& options);
  void set_stream(const Stream& stream);
  void gradient_ready(int parameter, const StridedView& gradient, reducer::GradientOwner owner,
                      const std::optional<Event>& produced);
  [[nodiscard]] Event packed();
  [[nodiscard]] std::vector<Stream> pack_streams() const;
  void reject_gradient(std::string_view message);
  void end_microbatch();
  void abandon_microbatch(std::string_view reason) noexcept;
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

 private:
  using Phase = reducer::StepLedger::Phase;
  using Holds = reducer::StepLedger::Holds;
  using Plan = std::shared_ptr<const reducer::MicrobatchPlan>;
  // Everything of one step that tasks on the streams share.
  struct Step {
    std::int64_t number = 0;
    Flag nonfinite;
    std::atomic<bool> found_inf{false};
    // kAgreed: every rank ends the step here, the result stands in stream order. kComputed: and the
    // device has it. kKnown: and found_inf is the whole world's. On the host these are one.
    enum class Progress : std::uint8_t { kRunning, kAgreed, kComputed, kKnown };
    std::atomic<Progress> progress{Progress::kRunning};
  };

  void compare_options();  // core_comparison.cpp

  // core.cpp
  void freeze();
  void check_usable(std::string_view call);  // rethrows what went wrong, or closed
  void raise_failure();
  void raise_abort();
  [[nodiscard]] std::optional<int> find_group(const std::optional<std::string>& group);

  // core_step.cpp
  void open(reducer::MicrobatchPlan plan);
  void collect(reducer::MicrobatchPlan plan);
  // The end of a microbatch, finish or discard on this rank: word, rest of the packs, end task.
  struct Closing {
    std::string_view call;
    Plan plan;
    bool abandoned = false;
    std::string reason;
  };
  void close_collection(const Closing& closing);
  void wait_for_words();
  void post_word(const Closing& closing);
  void enqueue_end_task(const Closing& closing);
  void drop_step();
  void note_fault(const std::string& message);
  [[nodiscard]] std::string missing_message() const;
  void check_gradient(int parameter, const StridedView& gradient) const;

  // core_agreement.cpp: on the shard stream's thread
  struct EndTask {
    std::shared_ptr<Step> step;
    std::int64_t sequence = 0;
    std::int64_t epoch = 0;
    bool ends_step = false;
    bool drops_step = false;  // discard
  };
  void run_end_task(const EndTask& task);
  [[nodiscard]] bool words_agree(const EndTask& task);
  void settle_bits(const EndTask& task);
  [[nodiscard]] std::string key(std::string_view kind, std::int64_t sequence) const;

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
  std::string id_;           // the same on every rank, unique in the world
  std::string snapshot_id_;  // random, the same on every rank

  Stream caller_;  // on which the caller reads results and writes gradients
  std::shared_ptr<Step> step_ = std::make_shared<Step>();
  Plan plan_;  // of the open microbatch
  std::mutex fault_mutex_;
  std::string fault_;                      // this rank's own error in the open microbatch
  std::int64_t word_sequence_ = 0;         // words posted
  std::atomic<std::int64_t> words_in_{0};  // words of all ranks seen
  std::int64_t all_gather_count_ = 0;
  mutable std::int64_t peak_resident_bytes_ = 0;

  std::optional<reducer::Outcome> outcome_;
  std::unique_ptr<reducer::Frozen> frozen_;
  SnapshotWriter snapshots_;
};

}  // namespace hsdp
