// A RowReducer's steps as the caller drives them: which backward of which step this rank is in, the
// status words, drops and ends [Note: rows of others].
//
// Threads: one call at a time.
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
#include "hsdp/reducer/row_sums.h"
#include "hsdp/reducer/status_word.h"
#include "hsdp/reducer/step_agreement.h"

namespace hsdp::reducer {

class RowSteps {
 public:
  // What it refers to outlives it.
  RowSteps(const Groups& ranks, std::vector<std::string> group_names, Outcome& outcome,
           RowSums& sums, std::function<HopOwner*()> hop);

  // Told how each step ends, and asked for a word in each status word.
  void add_party(std::weak_ptr<StepParty> party) { agreement_.add_party(std::move(party), 0); }

  // The RowReducer's calls of these names, as far as steps go.
  void set_requires_all_reduce(bool flag, std::span<const int> groups);
  [[nodiscard]] bool requires_all_reduce(int group) const {
    return groups_[index(group)].all_reduce;
  }
  void reject(const std::string& message);
  void end_backward();
  // The same, for who closes or drops the step next: waits for nobody.
  void leave_backward();
  [[nodiscard]] std::vector<int> begin_finish();
  void end_finish();
  void abandon(std::string_view reason) noexcept;
  // Drops a step that is begun, as its owner goes; waits for no rank. No other call may follow, but
  // for end_cut_steps().
  void close(std::string_view reason) noexcept;

  // UsageError where there is no such group.
  [[nodiscard]] std::size_t index(int group) const;
  // Rows of this step are kept of the group.
  [[nodiscard]] bool keeps(int group) const { return groups_[index(group)].row_count > 0; }
  void count_kept(int group);
  void forget_kept(int group) { groups_[index(group)].row_count = 0; }
  [[nodiscard]] bool begins_step() const { return row_count_ == 0 || is_complete(); }
  // Where the step's last backward is over, and nothing is left.
  void close_complete_step(std::string_view call);

  // A row is to be reduced.
  void begin_reduce();
  // It was, with those terms, which all ranks must have.
  void note_row(int group, int shard_size);
  // Before anything is summed, all ranks must be in the same backward of the same step: ranks that
  // count differently would add sums of different microbatches.
  void agree();
  [[nodiscard]] std::int64_t step() const { return step_; }
  // Backward passes in a total of the group, of the rank that has most.
  [[nodiscard]] std::int64_t carry_count(int group) const;

  // The world ends with that, inside a backward.
  void fail(std::exception_ptr error);
  // The parties are told of all steps that are begun.
  void end_cut_steps(const std::string& cause) { agreement_.end_cut_steps(step_, cause); }

 private:
  struct Group {
    std::string name;
    bool all_reduce = true;
    std::int64_t row_count = 0;  // kept
    std::int64_t most_rows = 0;  // of any rank, with this backward's, once agreed
  };
  // kAgreed once all ranks know that it goes over the replicas.
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
  // A rank has not ended the step before that one, and will not any more.
  [[nodiscard]] bool is_behind(const Words& words, std::int64_t step) const;
  void settle(std::int64_t step);
  void end_dropped(std::int64_t step, const std::string& cause);
  void drop(std::string_view reason);
  void next_step();

  // Whether a step's last backward is over with this call.
  [[nodiscard]] bool end_last_backward();
  void post_calls();
  // Before anybody uses the totals.
  void compare_calls(std::int64_t step, std::string_view act);

  const Groups& ranks_;
  std::vector<Group> groups_;
  Outcome& outcome_;
  RowSums& sums_;
  std::function<HopOwner*()> hop_;  // null: this rank is alone, or let go of it
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
