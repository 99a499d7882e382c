// A Reducer's steps as the caller drives them: opens and closes microbatches, posts status words,
// drops steps [Note: states of a Reducer].
//
// The first call that begins a step makes memory and lanes (prepare()). Calls come from one thread
// at a time, except gradient_ready() and reject_gradient(). Every call throws what ended the
// Reducer; a step that another rank dropped is thrown once.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/frozen.h"
#include "hsdp/reducer/gradient_faults.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/step_agreement.h"
#include "hsdp/reducer/step_ledger.h"

namespace hsdp::reducer {

class Steps {
 public:
  // All of these outlive it.
  Steps(const ReducerOptions& options, const ParameterTable& parameters, Groups& groups,
        MemoryCount memory);
  ~Steps();  // drops a step that is begun, and waits for all tasks, even after errors
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // Collective: makes what the steps need, unless it exists. May be tried again after an error.
  void prepare();
  void begin_step();
  void begin_microbatch(const MicrobatchOptions& options);
  void begin_window(const WindowOptions& options);
  void check_window();
  void leave_window(std::string_view reason) noexcept;
  // Waits for the words. Returns, in place of the next call, the error of a dropped step.
  [[nodiscard]] std::optional<StepAbortedError> take_drop();
  // `backwards`: the number of passes of which each handed-over gradient is the sum.
  void end_window(std::int64_t backwards);
  void gradient_ready(int parameter, StridedView gradient, GradientOwner owner,
                      const ValidAfter& valid);
  // Reports this rank's mistake: end_microbatch() throws it and drops the step. Does nothing if no
  // microbatch is open.
  void reject_gradient(std::string_view message);
  void end_microbatch();
  // Whether a gradient of the parameter was handed over in the step that is begun.
  [[nodiscard]] bool has_gradient(int parameter) const;
  void abandon(std::string_view reason) noexcept;
  void finish();
  void discard();
  void close();

  // Throws what went wrong, or that the Reducer was closed.
  void check_usable(std::string_view call);
  // UsageError while a microbatch is open, unless check_usable() throws.
  void require_idle(std::string_view call);
  // Waits until all ranks agree on what this rank has done, and throws if they do not.
  void wait_for_words();
  // The same, and waits until everything is reduced; on a GPU the caller's stream waits for that.
  void wait_reduced();

  // Between steps: frees memory that was allocated on first need.
  void release_memory();

  void add_party(std::weak_ptr<StepParty> party);

  // To set flags and factors; throws unless the Reducer is usable.
  [[nodiscard]] StepLedger& ledger_for(std::string_view call);
  [[nodiscard]] const StepLedger& ledger() const { return ledger_; }
  [[nodiscard]] const StepResult& result() const { return *result_; }
  void note_read() { ledger_.note_read(); }
  // The f by which the readable carry was, or will be, divided. Call it when no word is under way.
  [[nodiscard]] double divide_factor() const;
  [[nodiscard]] std::shared_ptr<const StepResult> shared_result() const { return result_; }
  [[nodiscard]] Frozen* frozen() const { return frozen_.get(); }  // null before prepare()
  [[nodiscard]] ReducerState state() const;
  // Which rank has dropped the last step that began, and why. Empty if none has.
  [[nodiscard]] std::string dropped_by() const { return ledger_.dropped() ? dropped_by_ : ""; }

  // The stream on which the caller produces gradients and reads results.
  void set_caller(const Stream& stream);
  [[nodiscard]] const Stream& caller() const { return caller_; }
  [[nodiscard]] Stream& caller() { return caller_; }

 private:
  using Phase = StepLedger::Phase;

  void check_failure(std::string_view call);
  void raise_failure(std::string_view call);
  void raise_drop();
  [[nodiscard]] AccumulateDtype sums_dtype(std::optional<AccumulateDtype> asked) const;
  void open(MicrobatchPlan plan, AccumulateDtype sums_dtype);
  void end(std::int64_t backwards);
  void require_meant(const MicrobatchOptions& options);
  void require_known_factor(const std::vector<Sync>& sync, std::optional<bool> has_batch);
  [[nodiscard]] bool ask_for_means(MicrobatchPlan& plan);
  void provide_memory();
  void order_packs();
  void close_local(std::int64_t backwards);
  void count_backwards(std::int64_t backwards);
  [[nodiscard]] std::optional<Words> raise_counts(std::int64_t word);
  void close_and_send(const char* call, std::int64_t backwards);
  // Tells all ranks that this one drops the step, and sends what they wait for.
  void drop(const std::string& reason);
  void forget_step(const std::string& dropped_by);
  void end_cut_steps() noexcept;
  void wait_until_judged();
  // The word for a microbatch, or for the step if nothing is sent.
  [[nodiscard]] StatusWord word_of(const char* call, const MicrobatchPlan& plan) const;
  [[nodiscard]] std::int64_t post(StatusWord word);
  void note_fault(const std::string& message);
  [[nodiscard]] std::string missing_message() const;

  const ReducerOptions& options_;
  const ParameterTable& parameters_;
  Groups& groups_;
  MemoryCount memory_;
  GradientFaults faults_;
  StepLedger ledger_;
  Outcome outcome_;
  StepAgreement agreement_;
  Stream caller_;
  std::shared_ptr<StepResult> result_ = std::make_shared<StepResult>();
  std::shared_ptr<const MicrobatchPlan> plan_;  // of the open microbatch
  WindowOptions window_;                        // of the last window that began
  std::vector<char> means_;                     // of the step, by bucket
  bool zeros_sent_ = false;                     // for a dropped step, since the last begin
  std::string dropped_by_;
  std::unique_ptr<Frozen> frozen_;
};

}  // namespace hsdp::reducer
