// What the ranks must agree on in a step: one status word each for everything that sends, and for a
// dropped step, and in the end whether any rank met a non-finite value [Note: status word].
//
// The caller's thread posts, one word at a time; tasks collect and judge it. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/status_word.h"
#include "hsdp/step_party.h"

namespace hsdp::reducer {

// At what the ranks say in the end of a step.
struct StepLooks {
  // Of all ranks, where these are not all the same.
  std::function<void(const std::vector<std::string>& calls)> at_calls{};
  // The largest of all ranks' numbers, by place, where they gave any.
  std::function<void(std::span<const std::int64_t> most)> at_most{};
};

class StepAgreement {
 public:
  // `id` is the same on every rank and unique in the world.
  StepAgreement(Communicator world, std::string id, WordNames names = {});

  // Whoever keeps state by steps: says a word in each status word, and is told how each step ended,
  // from `first_step` on. Between steps, in the same order on all ranks; it may die whenever it
  // likes.
  void add_party(std::weak_ptr<StepParty> party, std::int64_t first_step);
  // Their words now, for a status word. Throws what they throw, and for one that is too long.
  [[nodiscard]] Sections sections() const;
  // Tells all of them, in the order of steps; then throws what the first of them threw.
  void end_step(const StepEnd& end);
  [[nodiscard]] std::int64_t ended_steps() const { return ended_steps_; }
  // Those of so many begun ones that the world's end, or a close that waited no longer, kept the
  // ranks from agreeing on: they end as dropped.
  void end_cut_steps(std::int64_t begun_steps, const std::string& cause);
  [[nodiscard]] bool has_state() const;

  // Tells the others; never blocks. Which word it is, for collect() and the like.
  [[nodiscard]] std::int64_t post(StatusWord word);
  // A word was posted that is not judged yet.
  [[nodiscard]] bool under_way() const { return judged_ < posted_; }

  // Each word once.
  [[nodiscard]] Words collect(std::int64_t number);
  // As long as the others live: after a drop they may first learn of it in a later microbatch.
  // Nothing when stop_waiting() ran out.
  [[nodiscard]] std::optional<Words> collect_patiently(std::int64_t number);
  // No patience beyond the world's timeout from here on.
  void stop_waiting();

  struct Judgement {
    std::optional<comm::Failure> mismatch;  // nothing else then
    bool dropped = false;
    std::string cause;
    std::optional<Drop> drop;  // to raise on this rank; none where it dropped the step itself
  };
  [[nodiscard]] Judgement judge(const Words& words);
  // Throws it on all ranks, and for good.
  [[noreturn]] void end_world(const comm::Failure& mismatch);
  void set_judged(std::int64_t number) { judged_ = number; }

  // By parameter, '1' where this rank had a gradient in that step, else '0'; returns where any rank
  // had one. Waits for the others.
  [[nodiscard]] std::string join_present(std::int64_t step, const std::string& present);

  // What this rank has called by now; a number is used once. And that of all ranks, in their order;
  // nothing where it is the same.
  void post_calls(std::int64_t number, const std::string& calls);
  [[nodiscard]] std::optional<std::vector<std::string>> collect_calls(std::int64_t number);

  // Whether this rank met a non-finite value in that step, and a word on the calls that it made:
  // each says it once, and then settles the step: waits for the others, looks at what they said,
  // and ends it. Returns whether any rank met one.
  void post_nonfinite(std::int64_t step, bool here, const std::string& calls = {},
                      std::vector<std::int64_t> most = {});
  bool settle(std::int64_t step, const StepLooks& looks = {});

  // For another exchange; each kind has its own numbers.
  [[nodiscard]] std::string key(std::string_view kind, std::int64_t number) const;

 private:
  struct Party {
    std::weak_ptr<StepParty> party;
    std::int64_t first_step = 0;
  };
  struct Present {
    std::shared_ptr<StepParty> party;  // null: gone
    std::int64_t first_step = 0;
  };
  [[nodiscard]] std::vector<Present> parties() const;
  void forget_gone(const Words& words);
  // Of the first difference between parties, its own text where they have one.
  [[nodiscard]] comm::Failure explain(Mismatch mismatch, const Words& words,
                                      const WordNames& names);
  [[nodiscard]] Words words_of(std::int64_t number, comm::Agreement all);

  Communicator world_;
  std::string id_;
  WordNames names_;
  mutable std::mutex mutex_;
  std::vector<Party> parties_;
  std::map<std::int64_t, StatusWord> own_;  // posted and not collected, by number
  std::atomic<std::int64_t> ended_steps_{0};
  std::atomic<std::int64_t> posted_{0};
  std::atomic<std::int64_t> judged_{0};
  std::atomic<std::chrono::steady_clock::time_point> give_up_{
      std::chrono::steady_clock::time_point::max()};
};

}  // namespace hsdp::reducer
