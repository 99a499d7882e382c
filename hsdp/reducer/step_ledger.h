// Where a step stands: which calls may come, what the next microbatch does, and how many are summed
// where. Pure: it knows no memory, no ranks and no streams. Not thread-safe.
//
// [Note: states of a Reducer] draws the states.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "hsdp/reducer/microbatch_plan.h"
#include "hsdp/reducer/step_divisor.h"

namespace hsdp::reducer {

class StepLedger {
 public:
  // `replica_dtype`: for its plans; none: the shard hop's.
  StepLedger(int shard_size, int replicate_size, std::optional<Dtype> replica_dtype = {},
             DivideBy divide_by = DivideBy::kRanks);

  enum class Phase : std::uint8_t { kIdle, kCollecting, kClosed };
  // What the carry and the local sums hold.
  enum class Holds : std::uint8_t { kNothing, kPending, kResult };

  [[nodiscard]] Phase phase() const { return phase_; }
  [[nodiscard]] Holds holds() const { return holds_; }
  [[nodiscard]] bool pending() const { return holds_ == Holds::kPending; }
  // UsageError naming `call` and the remedy.
  void require_idle(std::string_view call) const;
  void require_collecting(std::string_view call) const;

  // From here on there are that many groups of parameters, all flags on but those set before.
  void set_group_count(int count);
  // `group`: all of them when absent. As in FSDP2 gradient sync sets the all-reduce flag too.
  void set_requires_gradient_sync(bool flag, std::optional<int> group);
  void set_requires_all_reduce(bool flag, std::optional<int> group);
  void set_gradient_divide_factor(std::optional<double> factor);
  // From here to the step's end the factor stands: a hop divides by it.
  void fix_divide_factor() { divisor_.fix(); }
  void set_loss_scale(double scale);
  // What this rank adds to the next microbatch's count, which then divides.
  void divide_by_tokens(std::int64_t count);

  // What last = false means: kShard, or kNone.
  void set_partial_sync(Sync sync);
  [[nodiscard]] Sync partial_sync() const { return partial_sync_; }

  // The sync of each group: an explicit one, else by the flags and `last` [Note: which sync].
  // UsageError when they contradict each other; nothing has changed then.
  [[nodiscard]] std::vector<Sync> sync_of(const MicrobatchOptions& options) const;
  [[nodiscard]] std::vector<Sync> sync_of(const WindowOptions& options) const;
  // What else a microbatch may not be, which a caller could not mean. UsageError where it says
  // neither `last` nor `sync`, with flags that nobody has set, and would begin a step over a result
  // that nobody has read; and where others of its step were counted by tokens.
  void require_meant(const MicrobatchOptions& options) const;
  // The result was read, or is not wanted.
  void note_read() { is_read_ = true; }
  void forget_result();
  // Begins a step before its first microbatch. UsageError while one is pending.
  void begin_step();
  // A step is begun, and has neither ended nor been dropped.
  [[nodiscard]] bool begun() const { return begun_; }
  // The last step that began was dropped.
  [[nodiscard]] bool dropped() const { return dropped_; }
  // Opens a microbatch; the first one of a step begins the step, unless begin_step() has.
  [[nodiscard]] MicrobatchPlan begin(const std::vector<Sync>& sync, const Intake& intake = {},
                                     std::optional<bool> has_batch = {});
  // The same as a window, which is one microbatch. Microbatches inside of it only delimit, and
  // flags that are set there are undone at its end.
  [[nodiscard]] MicrobatchPlan begin_window(const std::vector<Sync>& sync, const Intake& intake,
                                            std::optional<bool> has_batch = {});
  [[nodiscard]] bool in_window() const {
    return window_ == Window::kOpen || window_ == Window::kMicrobatchOpen;
  }
  void begin_inside();
  void end_inside();
  // UsageError unless a window is open, with no microbatch open in it. A window whose step was
  // dropped inside of it lasts until it is left: every call is refused until then.
  void require_window_end() const;
  void leave_dropped_window();
  // Opens what completes a pending step without fresh gradients.
  [[nodiscard]] MicrobatchPlan begin_finish();
  // What a discard or a drop says about the step.
  [[nodiscard]] MicrobatchPlan plan_of_step() const;
  // Closes what that plan opened; its sums count.
  void end(const MicrobatchPlan& plan);
  // Backward passes of a window that are a microbatch each in the mean.
  [[nodiscard]] bool counts_passes() const {
    return in_window() && divisor_.averages_microbatches();
  }
  // Forgets the step: pending, open, or ended on this rank before another one dropped it.
  void drop();
  void close() { phase_ = Phase::kClosed; }

  struct Group {
    std::int64_t local_count = 0;  // microbatches in the local sums
    std::int64_t carry_count = 0;  // microbatches in the carry
    bool has_total = false;        // of replica sums
    bool counts_differ = false;    // between ranks, of local_count
  };
  [[nodiscard]] const std::vector<Group>& groups() const { return groups_; }
  [[nodiscard]] bool has_local_sums() const;
  [[nodiscard]] std::int64_t microbatch() const { return microbatch_; }  // of the step
  // What the carry that can be read was, or is to be, divided by: f and s. Where it is counted f
  // follows from these.
  [[nodiscard]] double divide_factor() const {
    return pending() ? divisor_.partial_factor(microbatch_) : divisor_.result_factor();
  }
  [[nodiscard]] double loss_scale() const {
    return pending() ? divisor_.loss_scale() : divisor_.result_scale();
  }
  [[nodiscard]] std::int64_t summed_microbatches() const { return divisor_.summed(microbatch_); }
  [[nodiscard]] const StepDivisor& divisor() const { return divisor_; }

  struct Counts {
    std::int64_t microbatches = 0;
    std::int64_t steps = 0;        // finished ones
    std::int64_t begun_steps = 0;  // dropped ones too
  };
  [[nodiscard]] Counts counts() const { return {microbatch_total_, step_total_, step_ + 1}; }

 private:
  struct Flags {
    bool gradient_sync = true;
    bool all_reduce = true;
  };
  enum class Window : std::uint8_t { kNone, kOpen, kMicrobatchOpen, kDropped };
  void leave_window(Window left);
  template <typename Apply>
  void each_flags(std::optional<int> group, Apply apply);
  void require_gradient_sync(std::string_view call) const;
  [[nodiscard]] Sync sync_of(const MicrobatchOptions& options, const Flags& flags) const;
  [[nodiscard]] MicrobatchPlan open(const std::vector<Sync>& sync, bool fresh,
                                    const Intake& intake);
  void start_step();
  [[nodiscard]] MicrobatchPlan begin_any(const std::vector<Sync>& sync, Intake intake,
                                         std::optional<bool> has_batch, bool is_window);

  int shard_size_;
  int replicate_size_;
  std::optional<Dtype> replica_dtype_;
  StepDivisor divisor_;
  std::atomic<Phase> phase_ = Phase::kIdle;  // any thread may ask for it
  std::atomic<Window> window_ = Window::kNone;
  Holds holds_ = Holds::kNothing;
  Sync partial_sync_ = Sync::kShard;
  std::vector<Flags> flags_ = std::vector<Flags>(1);
  std::vector<Flags> flags_before_window_;
  std::vector<Group> groups_ = std::vector<Group>(1);
  bool flags_were_set_ = false;
  bool is_read_ = false;      // the result
  bool lost_unread_ = false;  // one, when the step began
  bool begun_ = false;
  bool dropped_ = false;
  std::int64_t step_ = -1;
  std::int64_t microbatch_ = 0;
  std::int64_t microbatch_total_ = 0;
  std::int64_t step_total_ = 0;
};

}  // namespace hsdp::reducer
