// Whoever keeps state by steps: a replica hop, an optimizer, a parameter gather. It says a word in
// the ranks' status words, which must be the same on all of them, and is told how each step ended
// [Note: step parties].
//
// word() is called on the thread that drives the Reducer, end_step() on one of the Reducer's own;
// never both at once for one step. Neither may call the Reducer. A party may die at any time, on
// one rank before the others; if the Reducer is just talking to it, on that thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hsdp {

// kOverflow: some rank met a value that is not finite. kDropped: also a discarded one.
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

  // Names it in errors: "replica hop loco".
  [[nodiscard]] virtual std::string owner() const = 0;
  // Equal on all ranks, at most kMaxWordBytes. A throw drops the step.
  [[nodiscard]] virtual std::string word() const { return {}; }
  // The text, in lines, that a word is a digest of: "#" and some digits. Where the ranks' words
  // differ, the error has the first line that does. Empty where the party does not know any more.
  [[nodiscard]] virtual std::string details(const std::string& word) const {
    static_cast<void>(word);
    return {};
  }
  // What to do where the ranks' words differ. Empty: to give it the same settings and calls.
  [[nodiscard]] virtual std::string remedy() const { return {}; }
  // Every rank's status word is in. Commits what the step changed or goes back to what was before,
  // before the next step begins. Each step that was begun ends once, in order; one that the world's
  // end or a close has cut ends as dropped when the Reducer is closed or goes. A throw ends the
  // world.
  virtual void end_step(const StepEnd& end) { static_cast<void>(end); }
  // Whether that has to come before the next step's first hop. On a GPU the thread that issues the
  // hops then waits for the device once a step.
  [[nodiscard]] virtual bool has_state() const { return true; }
};

}  // namespace hsdp
