#include "hsdp/reducer/step_agreement.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
StepAgreement::StepAgreement(Communicator world, std::string id, WordNames names)
    : world_(std::move(world)), id_(std::move(id)), names_(std::move(names)) {}

std::string StepAgreement::key(std::string_view kind, std::int64_t number) const {
  return id_ + "/" + std::string(kind) + "/" + std::to_string(number);
}

void StepAgreement::add_party(std::weak_ptr<StepParty> party, std::int64_t first_step) {
  const std::scoped_lock lock(mutex_);
  parties_.push_back({std::move(party), first_step});
}

std::vector<StepAgreement::Present> StepAgreement::parties() const {
  std::vector<Present> all;
  const std::scoped_lock lock(mutex_);
  for (const auto& [party, first_step] : parties_) all.push_back({party.lock(), first_step});
  return all;
}

Sections StepAgreement::sections() const {
  Sections sections;
  for (const auto& [party, first_step] : parties()) {
    if (!party) {
      sections.emplace_back();
      continue;
    }
    const std::string& section = sections.emplace_back(party->word()).value();
    if (section.size() <= StepParty::kMaxWordBytes) continue;
    throw UsageError(
        {.where = party->owner(),
         .expected = "a word of at most " + std::to_string(StepParty::kMaxWordBytes) + " bytes",
         .got = std::to_string(section.size())});
  }
  return sections;
}

void StepAgreement::end_step(const StepEnd& end) {
  ended_steps_ = end.step + 1;
  std::exception_ptr error;
  for (const auto& [party, first_step] : parties()) {
    if (!party || end.step < first_step) continue;
    try {
      party->end_step(end);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

void StepAgreement::end_cut_steps(std::int64_t begun_steps, const std::string& cause) {
  while (ended_steps_ < begun_steps) end_step({ended_steps_, StepOutcome::kDropped, cause});
}

bool StepAgreement::has_state() const {
  return std::ranges::any_of(parties(),
                             [](const auto& p) { return p.party && p.party->has_state(); });
}

// Forgets parties that are gone on every rank: later words have no section for them.
void StepAgreement::forget_gone(const Words& words) {
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = parties_.size(); i-- > 0;) {
    if (words.is_gone(i)) parties_.erase(parties_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

std::int64_t StepAgreement::post(StatusWord word) {
  const std::int64_t number = posted_ + 1;
  const comm::Saying saying = word.saying();
  {
    const std::scoped_lock lock(mutex_);
    own_[number] = std::move(word);
  }
  world_.post(key("word", number), saying);
  posted_ = number;  // it is under way from here on
  return number;
}

Words StepAgreement::words_of(std::int64_t number, comm::Agreement all) {
  const std::scoped_lock lock(mutex_);
  return {.own = std::move(own_.extract(number).mapped()), .all = std::move(all)};
}

Words StepAgreement::collect(std::int64_t number) {
  return words_of(number, world_.collect(key("word", number), names_.waiting));
}

std::optional<Words> StepAgreement::collect_patiently(std::int64_t number) {
  constexpr std::chrono::milliseconds kBetweenLooks{100};  // whether to give up
  while (std::chrono::steady_clock::now() < give_up_.load()) {
    auto all = world_.collect_within(key("word", number), names_.waiting, kBetweenLooks);
    if (all) return words_of(number, std::move(*all));
  }
  return std::nullopt;
}

void StepAgreement::stop_waiting() {
  give_up_ = std::chrono::steady_clock::now() + world_.engine()->control().timeout();
}

StepAgreement::Judgement StepAgreement::judge(const Words& words) {
  WordNames names = names_;
  for (const Present& present : parties()) {
    names.parties.push_back(present.party
                                ? WordNames::Party{present.party->owner(), present.party->remedy()}
                                : WordNames::Party{"an optimizer or replica hop"});
  }
  Judgement judgement;
  if (auto mismatch = find_mismatch(words.all, world_.world_ranks(), names)) {
    judgement.mismatch = explain(std::move(*mismatch), words, names);
    return judgement;
  }
  forget_gone(words);
  const std::optional<DropWord> drop = words.drop();
  if (!drop) return judgement;
  judgement.dropped = true;
  judgement.cause = drop->reason;
  if (words.own.dropped || words.own.call == kDiscardCall) return judgement;
  const std::vector<int> ranks = world_.world_ranks();
  const auto place = static_cast<int>(std::ranges::find(ranks, drop->rank) - ranks.begin());
  const std::string rank = comm::ranks_text({place}, world_.size());
  judgement.drop =
      Drop{names_.component + ": step " + std::to_string(words.own.step) + " was dropped by " +
               rank + " in " + names_.microbatch + " " + std::to_string(drop->microbatch) + ": " +
               drop->reason + "; begin a new step on every rank",
           {drop->rank},
           rank + ": " + drop->reason};
  return judgement;
}

// All ranks judge the same words, so all exchange details here, except a rank that dropped the step
// and reads no words yet; the others wait only shortly for it.
comm::Failure StepAgreement::explain(Mismatch mismatch, const Words& words,
                                     const WordNames& names) {
  constexpr std::chrono::seconds kPatience{5};
  constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
  if (!mismatch.party || !has_digest(words.all, *mismatch.party)) return mismatch.failure;
  const std::size_t place = *mismatch.party;
  const std::vector<Present> present = parties();
  const Sections& said = words.own.sections;
  std::optional<std::string> details;
  if (place < present.size() && present[place].party && place < said.size() && said[place]) {
    details = present[place].party->details(*said[place]).substr(0, kMaxBytes);
    if (details->empty()) details.reset();
  }
  try {
    const StatusWord agreed = words.fields();  // by all whose parties were compared
    const std::string name =
        key("details", agreed.step) + "/" + std::to_string(agreed.microbatch) + "/" + agreed.call;
    world_.post(name, {.equal = {details}});
    if (const auto all = world_.collect_within(name, names_.waiting, kPatience)) {
      comm::Agreement shown = words.all;
      show_details(shown, place, *all);
      if (auto found = find_mismatch(shown, world_.world_ranks(), names)) return found->failure;
    }
  } catch (const Error&) {  // the mismatch is more important
  }
  return mismatch.failure;
}

void StepAgreement::end_world(const comm::Failure& mismatch) {
  world_.engine()->control().fail(mismatch);
  comm::throw_failure(mismatch);
}

std::string StepAgreement::join_present(std::int64_t step, const std::string& present) {
  world_.post(key("present", step), {.any = present});
  return world_.collect(key("present", step), "unused parameters").any;
}

void StepAgreement::post_calls(std::int64_t number, const std::string& calls) {
  world_.post(key("calls", number), comm::message_to_all(calls));
}

std::optional<std::vector<std::string>> StepAgreement::collect_calls(std::int64_t number) {
  const comm::Agreement all = world_.collect(key("calls", number), names_.waiting);
  if (all.places.front().said.size() == 1) return std::nullopt;
  return all.messages(world_.world_ranks());
}

void StepAgreement::post_nonfinite(std::int64_t step, bool here, const std::string& calls,
                                   std::vector<std::int64_t> most) {
  world_.post(
      key("nonfinite", step),
      {.equal = {calls}, .any = {here ? '\1' : '\0'}, .most = std::move(most), .keeps_all = true});
}

bool StepAgreement::settle(std::int64_t step, const StepLooks& looks) {
  const comm::Agreement all = world_.collect(key("nonfinite", step), "found_inf");
  const bool overflow = all.any.front() != '\0';
  if (looks.at_calls && all.places.front().said.size() > 1) {
    looks.at_calls(all.messages(world_.world_ranks()));
  }
  if (looks.at_most && !all.most.empty()) looks.at_most(all.most);
  end_step({step, overflow ? StepOutcome::kOverflow : StepOutcome::kClean, {}});
  return overflow;
}

}  // namespace hsdp::reducer
