// What the ranks agree on in a step: one status word from each for every call that sends and for a
// dropped step, and at the end whether any rank met a non-finite value [Note: status word].
//
// The caller's thread posts one word at a time; tasks collect and judge it. Thread-safe.
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

// Called with what the ranks say at the end of a step.
struct StepLooks {
  // The calls of all ranks, if they differ.
  std::function<void(const std::vector<std::string>& calls)> at_calls{};
  // The largest of all ranks' numbers, by position, if they gave any.
  std::function<void(std::span<const std::int64_t> most)> at_most{};
};

class StepAgreement {
 public:
  // `id`: the same on every rank, unique in the world.
  StepAgreement(Communicator world, std::string id, WordNames names = {});

  // From `first_step` on, the party adds a section to each status word and is told how each step
  // ended. Between steps, in the same order on all ranks. The party may be destroyed at any time.
  void add_party(std::weak_ptr<StepParty> party, std::int64_t first_step);
  // The parties' sections for a status word. Throws what they throw, and for a section that is too
  // long.
  [[nodiscard]] Sections sections() const;
  // Tells all parties, in the order of steps; then throws the first error of any.
  void end_step(const StepEnd& end);
  [[nodiscard]] std::int64_t ended_steps() const { return ended_steps_; }
  // Ends as dropped those of `begun_steps` that the ranks did not agree on, because the world ended
  // or a close no longer waited.
  void end_cut_steps(std::int64_t begun_steps, const std::string& cause);
  [[nodiscard]] bool has_state() const;

  // Sends the word without blocking. Returns its number, for collect() and set_judged().
  [[nodiscard]] std::int64_t post(StatusWord word);
  // Whether a word was posted that is not judged yet.
  [[nodiscard]] bool under_way() const { return judged_ < posted_; }

  // Waits for the words of that number. Once for each number.
  [[nodiscard]] Words collect(std::int64_t number);
  // The same without a timeout while the other ranks live: they may first learn of a drop in a
  // later microbatch. None if that takes longer than stop_waiting() allows.
  [[nodiscard]] std::optional<Words> collect_patiently(std::int64_t number);
  // Limits collect_patiently() to the world's timeout from now on.
  void stop_waiting();

  struct Judgement {
    std::optional<comm::Failure> mismatch;  // if set, nothing else is
    bool dropped = false;
    std::string cause;
    std::optional<Drop> drop;  // to throw on this rank; none if it dropped the step itself
  };
  [[nodiscard]] Judgement judge(const Words& words);
  // Ends the world with the mismatch, which every rank throws.
  [[noreturn]] void end_world(const comm::Failure& mismatch);
  void set_judged(std::int64_t number) { judged_ = number; }

  // `present`: by parameter, '1' if this rank had a gradient in that step, else '0'. Waits for all
  // ranks, and returns the same for any rank.
  [[nodiscard]] std::string join_present(std::int64_t step, const std::string& present);

  // Exchange what this rank has called so far, under a number that is used once. collect_calls()
  // returns the texts of all ranks, in their order; none if they are the same.
  void post_calls(std::int64_t number, const std::string& calls);
  [[nodiscard]] std::optional<std::vector<std::string>> collect_calls(std::int64_t number);

  // post_nonfinite() says, once a step, whether this rank met a non-finite value, and which calls
  // it made. settle() then waits for all ranks, gives `looks` what they said, and ends the step.
  // Returns whether any rank met a non-finite value.
  void post_nonfinite(std::int64_t step, bool here, const std::string& calls = {},
                      std::vector<std::int64_t> most = {});
  bool settle(std::int64_t step, const StepLooks& looks = {});

  // The key of another exchange. Each kind has separate numbers.
  [[nodiscard]] std::string key(std::string_view kind, std::int64_t number) const;

 private:
  struct Party {
    std::weak_ptr<StepParty> party;
    std::int64_t first_step = 0;
  };
  struct Present {
    std::shared_ptr<StepParty> party;  // null: destroyed
    std::int64_t first_step = 0;
  };
  [[nodiscard]] std::vector<Present> parties() const;
  void forget_gone(const Words& words);
  // The failure for a mismatch, with a party's own text if its section differs.
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
