// What the ranks tell each other at the end of a microbatch, on the shard stream's thread.
#include <algorithm>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "hsdp/reducer/core.h"

namespace hsdp {

std::string Reducer::Core::key(std::string_view kind, std::int64_t sequence) const {
  return id_ + "/" + std::string(kind) + "/" + std::to_string(sequence);
}

void Reducer::Core::run_end_task(const EndTask& task) {
  frozen_->pipeline().hold(task.step->nonfinite);
  if (words_agree(task)) {
    // On a GPU the result stands before the device has computed it: streams wait for it, not hosts.
    const bool on_host = mesh_.device().type == DeviceType::kHost;
    if (!on_host && task.ends_step) task.step->progress = Step::Progress::kAgreed;
    frozen_->pipeline().run_when_done([this, task, packs = frozen_->collector().record_packs()] {
      settle_bits(task);
      frozen_->collector().let_go_of_read(packs);
    });
    if (!on_host && options_.replica_hop->has_state()) frozen_->pipeline().wait_watcher();
  }
  words_in_ = task.sequence;
  frozen_->collector().notify();
}

// At the step's end: tells the others whether this rank saw a non-finite value, and reads theirs.
void Reducer::Core::settle_bits(const EndTask& task) {
  if (task.drops_step) options_.replica_hop->end_step(false);
  if (!task.ends_step) return;
  if (mesh_.device().type != DeviceType::kHost) task.step->progress = Step::Progress::kComputed;
  const std::string bit_key = key("nonfinite", task.sequence);
  world_.post(bit_key, task.step->nonfinite->load() != 0 ? "1" : "0");
  const std::vector<std::string> bits = world_.collect(bit_key, "found_inf");
  if (std::ranges::count(bits, "1") > 0) task.step->found_inf = true;
  options_.replica_hop->end_step(!task.step->found_inf);
  task.step->progress = Step::Progress::kKnown;
}

// False when a rank abandoned the microbatch: the step is dropped.
bool Reducer::Core::words_agree(const EndTask& task) {
  std::vector<reducer::StatusWord> words;
  for (const std::string& bytes : world_.collect(key("word", task.sequence), "status word")) {
    words.push_back(reducer::StatusWord::decode(bytes));
  }
  if (const auto mismatch = reducer::find_mismatch(words, world_.world_ranks())) {
    world_.engine()->control().fail(*mismatch);
    comm::throw_failure(*mismatch);
  }
  const std::optional<int> abandoned = reducer::find_abandoned(words);
  if (!abandoned) return true;
  frozen_->pipeline().run_when_done([this] { options_.replica_hop->end_step(false); });
  if (!words[static_cast<std::size_t>(world_.rank())].abandoned) {
    const reducer::StatusWord& word = words[static_cast<std::size_t>(*abandoned)];
    const std::string text = "reducer: step " + std::to_string(task.step->number) +
                             " was dropped: rank " + std::to_string(*abandoned) + " of " +
                             std::to_string(world_.size()) + " abandoned microbatch " +
                             std::to_string(word.microbatch) + ": " + word.reason +
                             "; every rank is idle and may begin a new step";
    const int job_rank = world_.world_ranks()[static_cast<std::size_t>(*abandoned)];
    // A statement of its own: this thread keeps no share of what it hands over.
    std::exception_ptr error = std::make_exception_ptr(StepAbortedError(text, {job_rank}));
    // The next epoch may have begun before the words were in; no later one can have.
    outcome_->abort_step(std::move(error), task.epoch + 1, task.step->number);
  }
  return false;
}

}  // namespace hsdp
