// What every rank says at the end of a microbatch that sends something, of finish and of discard,
// and when it drops a step, over the control connection [Note: status word]. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/agreement.h"
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
  std::vector<GroupPlan> groups;  // what is sent, none where nothing is: sync alone is compared
  std::string sums = "one";       // gradients of a parameter; "several": counts differ by rank
  double divide_factor = 0;       // 0: the default rule
  double loss_scale = 1;
  CountBy count_by = CountBy::kNothing;
  Sections sections;
  // This rank's own.
  std::int64_t count = 0;  // of tokens or batches, since its last word
  int replica = 0;         // where it is added
  bool dropped = false;
  std::string reason;  // of a drop: names the parameter at fault; at most kMaxReasonBytes travel

  [[nodiscard]] comm::Saying saying() const;
};

constexpr std::size_t kMaxReasonBytes = 1024;

struct DropWord {
  int rank = 0;  // the lowest that dropped the step, in the world
  std::int64_t microbatch = 0;
  std::string reason;
};

// What the words of all ranks come to.
struct Words {
  StatusWord own;
  comm::Agreement all;

  [[nodiscard]] std::optional<DropWord> drop() const;
  [[nodiscard]] std::int64_t least_step() const;
  // By replica, as far as any was counted.
  [[nodiscard]] const std::vector<std::int64_t>& counts() const { return all.sum; }
  // What is compared, where anybody says it, of the lowest ranks that do, with the counts of the
  // rank that has most.
  [[nodiscard]] StatusWord fields() const;
  // Likewise, what is sent; none when nobody sends.
  [[nodiscard]] std::optional<StatusWord> sent() const;
  // The words were of that party, too; no rank has it any more, nor dropped the step.
  [[nodiscard]] bool is_gone(std::size_t party) const;
};

// How errors speak of a word.
struct WordNames {
  std::string component = "reducer";
  std::string microbatch = "microbatch";
  // What a rank does that waits for words.
  std::string_view waiting = "end of a microbatch";
  std::string remedy = "make the same calls with the same arguments on every rank";
  std::vector<std::string> groups{};  // where they have names
  struct Party {
    std::string owner;
    std::string remedy{};  // or the usual one
  };
  std::vector<Party> parties{};
};

// Whether a rank's word of that party has "#" and a digest in it.
[[nodiscard]] bool has_digest(const comm::Agreement& words, std::size_t party);

struct Mismatch {
  comm::Failure failure;
  std::optional<std::size_t> party{};  // in whose section it is
};

// The first disagreement between the ranks, as a failure of the world; nothing when they agree.
// Who dropped the step while it sent nothing is not asked, nor are the parties of any who dropped
// it; a party is compared among the ranks that still have it. `ranks` are the world ranks of the
// group, in its order.
[[nodiscard]] std::optional<Mismatch> find_mismatch(const comm::Agreement& words,
                                                    std::span<const int> ranks,
                                                    const WordNames& names = {});

// A party's word may be a digest. Given the texts behind it that ranks have told, replaces what
// they said in its place by the first lines that differ; where no line does, the words stay.
void show_details(comm::Agreement& words, std::size_t party, const comm::Agreement& details);

}  // namespace hsdp::reducer
