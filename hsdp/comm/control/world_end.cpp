#include "hsdp/comm/control/world_end.h"

#include <algorithm>
#include <cstdio>
#include <set>

namespace hsdp::comm {
namespace {

// Four missed beats: a rank under load may miss one or two.
constexpr std::chrono::milliseconds kSilence{1'000};

// A rank that speaks through a silent rank is silent, too: returns the highest such one.
int silent_above(const std::vector<RankReport>& reports, int rank) {
  for (;;) {
    const RankReport& report = reports[static_cast<std::size_t>(rank)];
    const auto silent = reports[static_cast<std::size_t>(report.parent)].silent;
    // It was heard long after this rank, so this rank's silence has another cause.
    if (report.parent == 0 || silent <= kSilence || silent + kSilence < report.silent) return rank;
    const int parent = report.parent;
    rank = parent;
  }
}

// The ends of all chains of waits that start at `first`: ranks that wait for no rank, or all ranks
// of a ring of waits.
std::vector<int> chain_ends(const std::vector<RankReport>& reports, const std::vector<int>& first) {
  std::set<int> ends;
  std::set<int> seen;
  std::vector<int> open = first;
  while (!open.empty()) {
    int rank = open.back();
    open.pop_back();
    if (rank < 0 || rank >= static_cast<int>(reports.size())) continue;
    if (reports[static_cast<std::size_t>(rank)].silent > kSilence) {
      rank = silent_above(reports, rank);
    }
    if (!seen.insert(rank).second) continue;
    const RankReport& report = reports[static_cast<std::size_t>(rank)];
    const bool stopped = report.silent > kSilence;
    std::vector<int> next;
    if (!stopped && !report.closed && !report.awaited.empty()) next = report.awaited.front();
    if (next.empty()) ends.insert(rank);
    open.insert(open.end(), next.begin(), next.end());
  }
  if (ends.empty()) ends = seen;
  return {ends.begin(), ends.end()};
}

std::string describe_absent(const std::vector<RankReport>& reports, const std::vector<int>& ranks,
                            std::chrono::milliseconds waited) {
  const int size = static_cast<int>(reports.size());
  std::string text = ranks_text(ranks, size) + " did not arrive within " + seconds_text(waited);
  bool works_alone = false;
  for (const int rank : ranks) {
    const RankReport& report = reports[static_cast<std::size_t>(rank)];
    const std::string who = ranks.size() == 1 ? "it" : "rank " + std::to_string(rank);
    if (report.silent > kSilence) {
      text += "; " + who + " is stopped or unreachable: no sign of life for " +
              seconds_text(report.silent);
    } else if (!report.waits.empty()) {
      text += "; " + who + " is alive, in " +
              operation_text(report.waits.front().operation, report.waits.front().bucket);
    } else {
      text += "; " + who + " is alive, but in no call";
      works_alone = true;
    }
  }
  if (works_alone) {
    text +=
        "; where a rank works alone for long, as in an evaluation, let all of them take part "
        "or make the mesh with a larger timeout_s";
  }
  return text;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks, int size) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text + " of " + std::to_string(size);
}

std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", static_cast<double>(time.count()) / 1000.0);
  return text;
}

std::string operation_text(std::string_view operation, int bucket) {
  return std::string(operation) + (bucket >= 0 ? " of bucket " + std::to_string(bucket) : "");
}

std::optional<WorldEnd> judge(const std::vector<RankReport>& reports,
                              std::chrono::milliseconds timeout) {
  const int size = static_cast<int>(reports.size());
  WorldEnd world_end;
  world_end.failure.kind = FailureKind::kTimeout;
  world_end.bare = true;
  for (int rank = 0; rank < size; ++rank) {
    const RankReport& report = reports[static_cast<std::size_t>(rank)];
    if (report.closed || report.silent < timeout) continue;
    const int highest = silent_above(reports, rank);
    world_end.failure.ranks = {highest};
    world_end.failure.message = ranks_text({highest}, size) +
                                " is stopped or unreachable: no sign of life for " +
                                seconds_text(reports[static_cast<std::size_t>(highest)].silent);
    return world_end;
  }
  const RankReport* oldest = nullptr;
  for (const RankReport& report : reports) {
    if (report.closed || report.waits.empty() || report.waits.front().age < timeout) continue;
    if (oldest == nullptr || report.waits.front().age > oldest->waits.front().age) oldest = &report;
  }
  if (oldest == nullptr) return std::nullopt;
  std::vector<int> awaited = oldest->awaited.front();
  if (awaited.empty()) {  // unknown: ranks that are stopped or in no wait have not arrived
    for (int rank = 0; rank < size; ++rank) {
      const RankReport& report = reports[static_cast<std::size_t>(rank)];
      if (report.waits.empty() || report.silent > kSilence) awaited.push_back(rank);
    }
  }
  const BeatWait& wait = oldest->waits.front();
  world_end.failure.ranks = chain_ends(reports, awaited);
  world_end.operation = wait.operation;
  world_end.bucket = wait.bucket;
  world_end.failure.message = world_end.failure.ranks.empty()
                                  ? "no answer within " + seconds_text(wait.age)
                                  : describe_absent(reports, world_end.failure.ranks, wait.age);
  return world_end;
}

WorldEnd end_by_loss(int rank, int size, const std::string& reason) {
  WorldEnd world_end;
  world_end.failure.kind = FailureKind::kPeerLost;
  world_end.failure.ranks = {rank};
  world_end.failure.message = ranks_text({rank}, size) + " was lost (" + reason + ")";
  world_end.bare = true;
  return world_end;
}

WorldEnd end_by_mismatch(int rank, const std::string& message) {
  return {.failure = {FailureKind::kMismatch, message, {rank}}};
}

WorldEnd end_by_malformed(const std::string& what, int rank) {
  return end_by_mismatch(rank, "control: malformed " + what + " from rank " + std::to_string(rank));
}

WorldEnd end_by_second_use(const std::string& key, int rank) {
  return end_by_mismatch(
      rank, "control: rank " + std::to_string(rank) + " used the key '" + key + "' twice");
}

WorldEnd end_by_error(int rank, const std::exception& error) {
  return {.failure = {FailureKind::kAborted,
                      std::string("control: internal error: ") + error.what(),
                      {rank}}};
}

}  // namespace hsdp::comm
