// A RowReducer's steps: which backward of which step this rank is in, its status words, drops and
// ends [Note: rows of others]. One call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/hop_owner.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/row_check.h"
#include "hsdp/reducer/row_sums.h"
#include "hsdp/reducer/status_word.h"
#include "hsdp/reducer/step_agreement.h"

namespace hsdp::reducer {

class RowSteps {
 public:
  // All that it refers to outlives it.
  RowSteps(const Groups& ranks, std::vector<std::string> group_names, Outcome& outcome,
           RowSums& sums, RowCheck& check, std::function<HopOwner*()> hop);

  // Adds a section to each status word, and tells `party` how each step ends.
  void add_party(std::weak_ptr<StepParty> party) { agreement_.add_party(std::move(party), 0); }

  // The steps' part of the RowReducer's calls of these names.
  void set_requires_all_reduce(bool flag, std::span<const int> groups);
  [[nodiscard]] bool requires_all_reduce(int group) const {
    return groups_[index(group)].all_reduce;
  }
  void reject(const std::string& message);
  void end_backward();
  // As end_backward(), for a caller that drops or closes the step next. Does not wait for other
  // ranks.
  void leave_backward();
  [[nodiscard]] std::vector<int> begin_finish();
  void end_finish();
  void abandon(std::string_view reason) noexcept;
  // Drops a step that is begun, without waiting for a rank. Only end_cut_steps() may follow.
  void close(std::string_view reason) noexcept;

  // UsageError for a group that does not exist.
  [[nodiscard]] std::size_t index(int group) const;
  // Whether rows of this step are kept for the group.
  [[nodiscard]] bool keeps(int group) const { return groups_[index(group)].row_count > 0; }
  void count_kept(int group);
  void forget_kept(int group) { groups_[index(group)].row_count = 0; }
  [[nodiscard]] bool begins_step() const { return row_count_ == 0 || is_complete(); }
  // Closes the step if its last backward is over and no rows are kept.
  void close_complete_step(std::string_view call);

  void begin_reduce();
  // A row was reduced, with those terms, which must be the same on all ranks.
  void note_row(int group, int shard_size);
  // Checks that all ranks are in the same backward of the same step, before anything is summed:
  // otherwise sums of different microbatches would be added.
  void agree();
  [[nodiscard]] std::int64_t step() const { return step_; }
  // Backward passes in a total of the group, on the rank that has most.
  [[nodiscard]] std::int64_t carry_count(int group) const;

  // Ends the world with that error of a backward.
  void fail(std::exception_ptr error);
  // Tells the parties of all steps that are begun.
  void end_cut_steps(const std::string& cause) { agreement_.end_cut_steps(step_, cause); }

 private:
  struct Group {
    std::string name;
    bool all_reduce = true;
    std::int64_t row_count = 0;  // rows kept
    std::int64_t most_rows = 0;  // the most of any rank, with this backward's; known once agreed
  };
  // kAgreed: all ranks know that it goes over the replicas.
  enum class Backward : std::uint8_t { kNothingReduced, kAgreed, kOver };
  struct Posted {
    std::int64_t number = 0;
    std::int64_t step = 0;
  };

  [[nodiscard]] bool is_alone() const { return ranks_.replicate.size() == 1; }
  [[nodiscard]] bool begun() const { return call_count_ > 0 || row_count_ > 0; }
  [[nodiscard]] bool is_complete() const;
  void close_backward(std::string_view call);
  [[nodiscard]] StatusWord word_of(const char* call) const;
  [[nodiscard]] Posted post(StatusWord word);
  [[nodiscard]] Words collect(const Posted& posted);
  void judge(const Posted& posted);
  void judge_own_drop();
  // Whether a rank has not ended the step before that one, and never will.
  [[nodiscard]] bool is_behind(const Words& words, std::int64_t step) const;
  // Waits for the step's work, and says what the ranks compare at its end.
  void post_end(std::int64_t step);
  void settle(std::int64_t step);
  void end_dropped(std::int64_t step, const std::string& cause);
  void drop(std::string_view reason);
  void next_step();

  // Whether a step's last backward is over with this call.
  [[nodiscard]] bool end_last_backward();
  void post_calls();
  // Before the totals are used.
  void compare_calls(std::int64_t step, std::string_view act);

  const Groups& ranks_;
  std::vector<Group> groups_;
  Outcome& outcome_;
  RowSums& sums_;
  RowCheck& check_;
  std::function<HopOwner*()> hop_;  // returns null without replicas, or after it was let go
  StepAgreement agreement_;

  std::int64_t step_ = 0;
  std::int64_t call_count_ = 0;  // of set_requires_all_reduce in this step
  std::int64_t row_count_ = 0;   // in this step
  std::uint64_t row_terms_ = 0;  // a hash of all rows that were reduced
  std::int64_t look_count_ = 0;  // how often calls were compared
  Backward backward_ = Backward::kNothingReduced;
  std::optional<Posted> own_drop_;  // not judged yet
  bool is_closed_ = false;
};

}  // namespace hsdp::reducer
