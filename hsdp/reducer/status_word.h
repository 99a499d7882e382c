// What every rank says at the end of a microbatch that sends something, of finish and of discard,
// and when it drops a step, over the control connection [Note: status word]. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/reducer/microbatch_plan.h"

namespace hsdp::reducer {

// What says the word. kDropCall: the step was dropped at a moment when nothing was sent.
constexpr const char* kMicrobatchCall = "microbatch";
constexpr const char* kBackwardCall = "backward";
constexpr const char* kFinishCall = "finish";
constexpr const char* kDiscardCall = "discard";
constexpr const char* kDropCall = "drop";

// Of the step's parties, in the order they were added; none of one that is gone on this rank.
using Sections = std::vector<std::optional<std::string>>;

struct StatusWord {
  // Equal on all ranks but those whose call is kDropCall.
  std::string call;
  std::int64_t step = 0;
  std::int64_t microbatch = 0;
  std::vector<GroupPlan> groups;  // what is sent; none where nothing is. Their sync is compared
  std::string sums = "one";       // gradients of a parameter; "several": counts differ by rank
  double divide_factor = 0;       // 0: the default rule
  double loss_scale = 1;
  CountBy count_by = CountBy::kNothing;
  Sections sections;
  // This rank's own.
  std::int64_t count = 0;  // of tokens or batches, since its last word
  bool dropped = false;
  std::string reason;  // names the parameter at fault; at most kMaxReasonBytes travel

  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static StatusWord decode(const std::string& bytes);
};

constexpr std::size_t kMaxReasonBytes = 1024;

// The first rank that dropped the step, as an index into `words`.
[[nodiscard]] std::optional<int> find_drop(std::span<const StatusWord> words);

// How errors speak of a word.
struct WordNames {
  std::string component = "reducer";
  std::string microbatch = "microbatch";
  // What a rank does that waits for words.
  std::string_view waiting = "end of a microbatch";
  std::string remedy = "make the same calls with the same arguments on every rank";
  std::vector<std::string> groups{};  // where they have names
  std::vector<std::string> parties{};
};

// Whether a rank's word of that party has "#" and a digest in it.
[[nodiscard]] bool has_digest(std::span<const StatusWord> words, std::size_t party);

struct Mismatch {
  comm::Failure failure;
  std::optional<std::size_t> party{};  // in whose section it is
};

// The first disagreement between the ranks, as a failure of the world; nothing when they agree.
// Who dropped the step while it sent nothing is not asked, nor are the parties of any who dropped
// it; a party is compared among the ranks that still have it. `ranks` are the world ranks behind
// the words.
[[nodiscard]] std::optional<Mismatch> find_mismatch(std::span<const StatusWord> words,
                                                    std::span<const int> ranks,
                                                    const WordNames& names = {});

// A party's word may be a digest. Given the text behind each rank's, replaces these digests by the
// first lines that differ. Ranks that dropped the step or have no text are left out; where no line
// differs, the words stay.
void show_details(std::vector<StatusWord>& words, std::size_t party,
                  std::span<const std::string> details);

// A word that says what is sent, of whichever rank sends; none when nobody does.
[[nodiscard]] const StatusWord* find_sender(std::span<const StatusWord> words);

}  // namespace hsdp::reducer
