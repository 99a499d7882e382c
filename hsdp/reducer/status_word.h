// What every rank says over the control connection at the end of a microbatch that sends something,
// of finish and of discard, and when it drops a step [Note: status word]. Pure.
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

// The call that says the word. kDropCall: the step was dropped while nothing was sent.
constexpr const char* kMicrobatchCall = "microbatch";
constexpr const char* kBackwardCall = "backward";
constexpr const char* kFinishCall = "finish";
constexpr const char* kDiscardCall = "discard";
constexpr const char* kDropCall = "drop";

// Sections of the step's parties, in the order they were added; none for a party that is gone on
// this rank.
using Sections = std::vector<std::optional<std::string>>;

struct StatusWord {
  // Equal on all ranks, except those whose call is kDropCall.
  std::string call;
  std::int64_t step = 0;
  std::int64_t microbatch = 0;
  std::vector<GroupPlan> groups;  // empty if nothing is sent; only their sync is compared
  std::string sums = "one";       // gradients of a parameter; "several": counts differ by rank
  double divide_factor = 0;       // 0: the default rule
  double loss_scale = 1;
  CountBy count_by = CountBy::kNothing;
  Sections sections;
  // Of this rank alone.
  std::int64_t count = 0;  // tokens or batches since its last word
  int replica = 0;         // whose sum the count is added to
  bool dropped = false;
  std::string reason;  // of a drop; at most kMaxReasonBytes travel

  [[nodiscard]] comm::Saying saying() const;
};

constexpr std::size_t kMaxReasonBytes = 1024;

struct DropWord {
  int rank = 0;  // the lowest world rank that dropped the step
  std::int64_t microbatch = 0;
  std::string reason;
};

// The words of all ranks, merged.
struct Words {
  StatusWord own;
  comm::Agreement all;

  [[nodiscard]] std::optional<DropWord> drop() const;
  [[nodiscard]] std::int64_t least_step() const;
  // By replica; may be shorter if nothing was counted.
  [[nodiscard]] const std::vector<std::int64_t>& counts() const { return all.sum; }
  // The compared fields, each from the lowest rank that says it, with the largest counts of any
  // rank.
  [[nodiscard]] StatusWord fields() const;
  // The same of the ranks that send; none if no rank sends.
  [[nodiscard]] std::optional<StatusWord> sent() const;
  // Whether the party is gone on every rank: no word has a section for it. False if a rank dropped
  // the step.
  [[nodiscard]] bool is_gone(std::size_t party) const;
};

// The names that errors use.
struct WordNames {
  std::string component = "reducer";
  std::string microbatch = "microbatch";
  // What a rank that waits for words is doing.
  std::string_view waiting = "end of a microbatch";
  std::string remedy = "make the same calls with the same arguments on every rank";
  std::vector<std::string> groups{};  // if they have names
  struct Party {
    std::string owner;
    std::string remedy{};  // empty: the usual one
  };
  std::vector<Party> parties{};
};

// Whether a rank's section of that party has "#" and a digest in it.
[[nodiscard]] bool has_digest(const comm::Agreement& words, std::size_t party);

struct Mismatch {
  comm::Failure failure;
  std::optional<std::size_t> party{};  // the party whose section differs
};

// The first disagreement between the ranks, as a failure of the world; none if they agree. Leaves
// out ranks that dropped the step while they sent nothing, and the sections of all ranks that
// dropped it. A party is compared among the ranks that still have it. `ranks`: the group's world
// ranks, in order.
[[nodiscard]] std::optional<Mismatch> find_mismatch(const comm::Agreement& words,
                                                    std::span<const int> ranks,
                                                    const WordNames& names = {});

// For a party whose section is a digest: given the texts behind the digests, replaces the sections
// by the first lines that differ. If no line differs, the words stay.
void show_details(comm::Agreement& words, std::size_t party, const comm::Agreement& details);

}  // namespace hsdp::reducer
