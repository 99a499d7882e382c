// The state of a step: which calls may come, what the next microbatch does, and how many
// microbatches are in which sums [Note: states of a Reducer]. Pure: knows no memory, ranks or
// streams. Not thread-safe.
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
  // `replica_dtype`: for its plans; none: as on the shard hop.
  StepLedger(int shard_size, int replicate_size, std::optional<Dtype> replica_dtype = {},
             DivideBy divide_by = DivideBy::kRanks);

  enum class Phase : std::uint8_t { kIdle, kCollecting, kClosed };
  // What the carry and the local sums hold.
  enum class Holds : std::uint8_t { kNothing, kPending, kResult };

  [[nodiscard]] Phase phase() const { return phase_; }
  [[nodiscard]] Holds holds() const { return holds_; }
  [[nodiscard]] bool pending() const { return holds_ == Holds::kPending; }
  // UsageErrors that name `call`.
  void require_idle(std::string_view call) const;
  void require_collecting(std::string_view call) const;

  // Sets the number of groups of parameters. New groups have all flags on.
  void set_group_count(int count);
  // Without `group`, of all groups. As in FSDP2, gradient sync also sets the all-reduce flag.
  void set_requires_gradient_sync(bool flag, std::optional<int> group);
  void set_requires_all_reduce(bool flag, std::optional<int> group);
  void set_gradient_divide_factor(std::optional<double> factor);
  // Fixes the factor until the step's end, as a hop divides by it.
  void fix_divide_factor() { divisor_.fix(); }
  void set_loss_scale(double scale);
  // Adds to the next microbatch's count of tokens, which becomes the divisor.
  void divide_by_tokens(std::int64_t count);

  // What last = false means: kShard, or kNone.
  void set_partial_sync(Sync sync);
  [[nodiscard]] Sync partial_sync() const { return partial_sync_; }

  // The sync of each group: the given one, else by the flags and `last` [Note: which sync].
  // UsageError if they contradict each other.
  [[nodiscard]] std::vector<Sync> sync_of(const MicrobatchOptions& options) const;
  [[nodiscard]] std::vector<Sync> sync_of(const WindowOptions& options) const;
  // Refuses microbatches that cannot be meant. UsageError for one without `last`, `sync` or flags
  // that were set, if it would begin a step while the last result was not read; and for one without
  // a count of tokens in a step that has counts of tokens, unless it has no batch.
  void require_meant(const MicrobatchOptions& options) const;
  void note_read() { is_read_ = true; }
  void forget_result();
  // Begins a step before its first microbatch. UsageError while one is pending.
  void begin_step();
  // Whether a step has begun and has neither ended nor been dropped.
  [[nodiscard]] bool begun() const { return begun_; }
  // Whether the last step that began was dropped.
  [[nodiscard]] bool dropped() const { return dropped_; }
  // Opens a microbatch. The first one of a step begins the step, unless begin_step() has.
  [[nodiscard]] MicrobatchPlan begin(const std::vector<Sync>& sync, const Intake& intake = {},
                                     std::optional<bool> has_batch = {});
  // Opens a window, which is one microbatch. Microbatches inside it only delimit passes. Its end
  // restores the flags.
  [[nodiscard]] MicrobatchPlan begin_window(const std::vector<Sync>& sync, const Intake& intake,
                                            std::optional<bool> has_batch = {});
  [[nodiscard]] bool in_window() const {
    return window_ == Window::kOpen || window_ == Window::kMicrobatchOpen;
  }
  void begin_inside();
  void end_inside();
  // UsageError unless a window is open without an open microbatch. After a drop inside a window
  // every call is refused until the window is left.
  void require_window_end() const;
  void leave_dropped_window();
  // Opens a finish, which completes a pending step without fresh gradients.
  [[nodiscard]] MicrobatchPlan begin_finish();
  // The plan by which a discard or a drop describes the step.
  [[nodiscard]] MicrobatchPlan plan_of_step() const;
  // Closes the microbatch or finish of that plan, and counts its sums.
  void end(const MicrobatchPlan& plan);
  // Whether each backward pass of the open window counts as a microbatch in the mean.
  [[nodiscard]] bool counts_passes() const {
    return in_window() && divisor_.averages_microbatches();
  }
  // Forgets the step, also one that this rank has ended before another rank dropped it.
  void drop();
  void close() { phase_ = Phase::kClosed; }

  struct Group {
    std::int64_t local_count = 0;  // microbatches in the local sums
    std::int64_t carry_count = 0;  // microbatches in the carry
    bool has_total = false;        // there is a replica-summed total
    bool counts_differ = false;    // ranks may have different local_counts
  };
  [[nodiscard]] const std::vector<Group>& groups() const { return groups_; }
  [[nodiscard]] bool has_local_sums() const;
  [[nodiscard]] std::int64_t microbatch() const { return microbatch_; }  // of the step
  // The f and s by which the readable carry was, or will be, divided. A counted f is known
  // elsewhere.
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
    std::int64_t steps = 0;        // finished
    std::int64_t begun_steps = 0;  // dropped ones included
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

  std::optional<Dtype> replica_dtype_;
  StepDivisor divisor_;
  std::atomic<Phase> phase_ = Phase::kIdle;  // any thread may read it
  std::atomic<Window> window_ = Window::kNone;
  Holds holds_ = Holds::kNothing;
  Sync partial_sync_ = Sync::kShard;
  std::vector<Flags> flags_ = std::vector<Flags>(1);
  std::vector<Flags> flags_before_window_;
  std::vector<Group> groups_ = std::vector<Group>(1);
  bool flags_were_set_ = false;
  bool is_read_ = false;      // the result was
  bool lost_unread_ = false;  // a result was lost unread when the step began
  bool begun_ = false;
  bool dropped_ = false;
  std::int64_t step_ = -1;
  std::int64_t microbatch_ = 0;
  std::int64_t microbatch_total_ = 0;
  std::int64_t step_total_ = 0;
};

}  // namespace hsdp::reducer
