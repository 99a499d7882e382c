// An object with state by steps: a replica hop, an optimizer, a parameter gather. It puts a word
// into each status word, which must be the same on all ranks, and is told how each step ended
// [Note: step parties].
//
// The thread that drives the Reducer calls word(), and a thread of the Reducer calls end_step();
// never both at once for one step. Neither may call the Reducer. A party may be destroyed at any
// time, on one rank before the others, and by a thread of the Reducer if that is calling the party.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hsdp {

// kOverflow: some rank met a value that is not finite. kDropped: dropped or discarded.
enum class StepOutcome : std::uint8_t { kClean, kOverflow, kDropped };

struct StepEnd {
  std::int64_t step = 0;
  StepOutcome outcome = StepOutcome::kClean;
  std::string cause;  // why it was dropped
};

class StepParty {
 public:
  static constexpr std::size_t kMaxWordBytes = 32;

  virtual ~StepParty() = default;

  // Its name in errors: "replica hop loco".
  [[nodiscard]] virtual std::string owner() const = 0;
  // Equal on all ranks, at most kMaxWordBytes. A throw drops the step.
  [[nodiscard]] virtual std::string word() const { return {}; }
  // For a word that is a digest ("#" and digits): its text, in lines. If the ranks' words differ,
  // the error has the first line that differs. Empty if the party no longer has the text.
  [[nodiscard]] virtual std::string details(const std::string& word) const {
    static_cast<void>(word);
    return {};
  }
  // The remedy if the ranks' words differ. Empty: to give it the same settings and calls.
  [[nodiscard]] virtual std::string remedy() const { return {}; }
  // Called when every rank's status word is in: commits what the step changed, or restores what was
  // before it. Each step that was begun ends once, in order. A step that the world's end or a close
  // has cut ends as dropped when the Reducer is closed or destroyed. A throw ends the world.
  virtual void end_step(const StepEnd& end) { static_cast<void>(end); }
  // Whether end_step() must come before the next step's first hop. On a GPU the thread that issues
  // the hops then waits for the device once a step.
  [[nodiscard]] virtual bool has_state() const { return true; }
};

}  // namespace hsdp
