#include "hsdp/reducer/compare_waits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "hsdp/comm/engine.h"
#include "hsdp/comm/rank_reports.h"
#include "hsdp/comm/shared_clock.h"
#include "hsdp/reducer/compare_lines.h"

namespace hsdp::reducer {
namespace {

constexpr std::string_view kAct = "compare waits";
constexpr double kNanosecond = 1e-9;
constexpr std::size_t kMostRows = 100'000;  // that fit into one message
constexpr int kMostLinks = 8;               // of a chain of waits

std::int64_t nanoseconds(double seconds) { return std::llround(seconds / kNanosecond); }
double in_seconds(std::int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * kNanosecond;
}

// The ranks that take part in an operation.
enum class Party : std::int8_t {
  kNone,  // not compared, but the rank may have waited in it
  kShardGroup,
  kReplicateGroup,
  kMesh,
};

// One rank's part in an operation, by the first rank's clock. A report is a clock error and then
// these, number by number.
struct Part {
  static constexpr std::size_t kNumbers = 5;
  std::uint64_t operation = 0;  // a digest
  Party party = Party::kNone;
  std::int64_t step = -1;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

bool is_collective(OperationKind kind) {
  return kind != OperationKind::kPack && kind != OperationKind::kUpdate &&
         kind != OperationKind::kWait;
}

Party party_of(OperationKind kind, const Groups& groups) {
  switch (kind) {
    case OperationKind::kShardHop:
      return Party::kShardGroup;
    case OperationKind::kReplicaHop:
      return Party::kReplicateGroup;
    case OperationKind::kWord:
      return Party::kMesh;
    case OperationKind::kNorm:
      return groups.parts > 1 ? Party::kMesh : Party::kShardGroup;
    case OperationKind::kGather:  // of parts: some go over one group, some over both
      return groups.parts > 1 ? Party::kNone : Party::kShardGroup;
    default:
      return Party::kNone;
  }
}

// Of the Reducer's operations and all others in which this rank may have waited.
std::vector<Part> own_parts(const Groups& groups, double offset_s) {
  const auto contents = groups.world.engine()->control().operations()->read();
  const std::string& key = groups.operations.source().key;
  std::vector<Part> parts;
  if (!contents.operations.empty() && contents.operations.front().number > 0) {
    // What came before has been overwritten.
    parts.push_back({.begin_ns = std::numeric_limits<std::int64_t>::min(),
                     .end_ns = nanoseconds(contents.operations.front().begin_s + offset_s)});
  }
  for (const RecordedOperation& one : contents.operations) {
    const OperationPlace& place = one.place;
    if (!is_collective(place.kind)) continue;
    Part part{.step = place.step,
              .begin_ns = nanoseconds(one.begin_s + offset_s),
              .end_ns = one.state == OperationState::kBegun
                            ? std::numeric_limits<std::int64_t>::max()
                            : nanoseconds(one.end_s + offset_s)};
    const auto source = contents.sources.find(one.source);
    if (source != contents.sources.end() && source->second.key == key) {
      std::string numbers;
      for (const std::int64_t number :
           {place.step, place.microbatch, place.turn, static_cast<std::int64_t>(place.index)}) {
        numbers += std::to_string(number) + " ";
      }
      part.operation = digest_of({source->second.lane_key, std::string(name(place.kind)), numbers});
      part.party = party_of(place.kind, groups);
    }
    parts.push_back(part);
  }
  return parts;
}

class WaitSharing {
 public:
  WaitSharing(std::map<int, std::vector<RankWait>> waits, std::int64_t error_ns)
      : waits_(std::move(waits)), error_ns_(error_ns) {
    for (auto& [rank, some] : waits_) {
      std::ranges::sort(some, {}, &RankWait::from_ns);
      std::vector<std::int64_t>& ends_ns = latest_ns_[rank];
      for (const RankWait& one : some) {
        ends_ns.push_back(ends_ns.empty() ? one.to_ns : std::max(ends_ns.back(), one.to_ns));
      }
    }
  }

  [[nodiscard]] WaitShares shares() {
    for (const auto& [rank, some] : waits_) {
      for (const RankWait& one : some) {
        if (one.awaited != kUnknownRank) share_out(rank, one, 0);
      }
    }
    return std::move(shares_);
  }

 private:
  // Where the awaited rank's own wait has no known cause, that part counts for none.
  void share_out(int waiting, const RankWait& wait, int links) {
    std::int64_t from_ns = wait.from_ns;
    const auto before = waits_.find(wait.awaited);
    if (before != waits_.end()) {
      const std::vector<RankWait>& theirs = before->second;
      const std::vector<std::int64_t>& ends_ns = latest_ns_.at(wait.awaited);
      auto next = theirs.begin() + (std::ranges::upper_bound(ends_ns, from_ns) - ends_ns.begin());
      for (; next != theirs.end() && next->from_ns < wait.to_ns; ++next) {
        const RankWait& one = *next;
        const RankWait part{one.awaited, std::max(one.from_ns, from_ns),
                            std::min(one.to_ns, wait.to_ns)};
        const bool goes_on = one.to_ns - error_ns_ > wait.to_ns;  // beside it, on another lane
        if (part.to_ns <= part.from_ns || goes_on || one.awaited == waiting) continue;
        shares_[{waiting, wait.awaited}] += part.from_ns - from_ns;
        if (one.awaited == kUnknownRank || links == kMostLinks) {
          shares_[{waiting, kUnknownRank}] += part.to_ns - part.from_ns;
        } else {
          share_out(waiting, part, links + 1);
        }
        from_ns = part.to_ns;
      }
    }
    shares_[{waiting, wait.awaited}] += wait.to_ns - from_ns;
  }

  std::map<int, std::vector<RankWait>> waits_;
  // Of each wait: when it and those before it have ended, the last of them.
  std::map<int, std::vector<std::int64_t>> latest_ns_;
  std::int64_t error_ns_;
  WaitShares shares_;
};

// On the first rank.
class WaitComparison {
 public:
  WaitComparison(int replicate, int shard) : replicate_(replicate), shard_(shard) {}

  void take(int rank, const std::vector<std::int64_t>& report) {
    errors_ns_[rank] = report.at(0);
    for (std::size_t i = 1; i + Part::kNumbers <= report.size(); i += Part::kNumbers) {
      const Part part{static_cast<std::uint64_t>(report[i]), static_cast<Party>(report[i + 1]),
                      report[i + 2], report[i + 3], report[i + 4]};
      if (part.party == Party::kNone) {
        add_unknown(rank, part);
      } else if (size_of(part.party) > 1) {
        parts_[{part.operation, group_of(part.party, rank)}].emplace_back(rank, part);
      }
    }
  }

  // `now_ns`: the first rank's clock, as errors were measured.
  [[nodiscard]] std::vector<std::int64_t> table(std::int64_t now_ns) {
    now_ns_ = now_ns;
    find_waits();
    WaitShares shares = share_waits(std::move(waits_), error_ns_);
    std::erase_if(shares, [&](const auto& one) { return one.second <= error_ns_; });
    std::map<int, std::int64_t> totals;
    for (const auto& [pair, share] : shares) {
      if (pair.second != kUnknownRank) totals[pair.second] += share;
    }
    const auto straggler =
        std::ranges::max_element(totals, {}, [](const auto& one) { return one.second; });
    std::vector<std::pair<std::pair<int, int>, std::int64_t>> rows(shares.begin(), shares.end());
    if (rows.size() > kMostRows) {
      std::ranges::sort(rows, std::greater(), [](const auto& row) { return row.second; });
      rows.resize(kMostRows);
      std::ranges::sort(rows);
    }
    std::vector<std::int64_t> numbers{count_, std::ssize(steps_),
                                      count_ > 0 ? last_ns_ - first_ns_ : 0, error_ns_,
                                      straggler == totals.end() ? -1 : straggler->first};
    for (const auto& [pair, share] : rows) {
      numbers.insert(numbers.end(), {pair.first, pair.second, share});
    }
    return numbers;
  }

 private:
  // In it the rank may have waited for any other.
  void add_unknown(int rank, const Part& part) {
    waits_[rank].push_back({kUnknownRank, part.begin_ns, part.end_ns});
  }

  // A group's ranks each once: an operation that can be compared.
  [[nodiscard]] bool is_whole(const std::vector<std::pair<int, Part>>& parts) const {
    std::set<int> ranks;
    for (const auto& [rank, part] : parts) ranks.insert(rank);
    const int size = size_of(parts.front().second.party);
    return static_cast<int>(parts.size()) == size && static_cast<int>(ranks.size()) == size;
  }

  void find_waits() {
    for (const auto& [key, parts] : parts_) {
      if (!is_whole(parts)) {
        for (const auto& [rank, part] : parts) add_unknown(rank, part);
        continue;
      }
      const auto begin = [](const auto& one) { return one.second.begin_ns; };
      const auto& [awaited, last] = *std::ranges::max_element(parts, {}, begin);
      const std::int64_t first_ns = std::ranges::min_element(parts, {}, begin)->second.begin_ns;
      first_ns_ = std::min(first_ns_, first_ns);
      last_ns_ = std::max(last_ns_, last.begin_ns);
      ++count_;
      if (last.step >= 0) steps_.insert(last.step);
      for (const auto& [rank, part] : parts) {
        const RankWait wait{awaited, part.begin_ns, std::min(last.begin_ns, part.end_ns)};
        const std::int64_t error_ns = errors_ns_[rank] + errors_ns_[awaited] + drift_ns(first_ns);
        if (rank != awaited) error_ns_ = std::max(error_ns_, error_ns);
        if (wait.to_ns - wait.from_ns > error_ns) waits_[rank].push_back(wait);
      }
    }
  }

  // By which two clocks may have come apart since, and each from the first rank's.
  [[nodiscard]] std::int64_t drift_ns(std::int64_t at_ns) const {
    const auto age_ns = static_cast<double>(std::max<std::int64_t>(now_ns_ - at_ns, 0));
    return std::llround(2 * comm::kMostDrift * age_ns);
  }

  [[nodiscard]] int group_of(Party party, int rank) const {
    if (party == Party::kMesh) return 0;
    return party == Party::kReplicateGroup ? rank % shard_ : rank / shard_;
  }
  [[nodiscard]] int size_of(Party party) const {
    if (party == Party::kMesh) return replicate_ * shard_;
    return party == Party::kReplicateGroup ? replicate_ : shard_;
  }

  int replicate_;
  int shard_;
  std::map<int, std::int64_t> errors_ns_;  // of the ranks' clocks, when they were measured
  std::int64_t now_ns_ = 0;
  std::map<std::pair<std::uint64_t, int>, std::vector<std::pair<int, Part>>> parts_;
  std::map<int, std::vector<RankWait>> waits_;  // by waiting rank
  // Of what was compared:
  std::int64_t count_ = 0;
  std::set<std::int64_t> steps_;
  std::int64_t first_ns_ = std::numeric_limits<std::int64_t>::max();
  std::int64_t last_ns_ = std::numeric_limits<std::int64_t>::min();
  std::int64_t error_ns_ = 0;  // of the time between two ranks, at most
};

}  // namespace

WaitShares share_waits(std::map<int, std::vector<RankWait>> waits, std::int64_t error_ns) {
  return WaitSharing(std::move(waits), error_ns).shares();
}

WaitTable compare_waits(Groups& groups, const std::function<double()>& now_s) {
  Communicator& world = groups.world;
  static_cast<void>(world.exchange("", kAct));
  const std::string key = world.next_exchange_key();
  const comm::ClockOffset clock = comm::measure_clock(world, key + "/clock", now_s);
  comm::Saying report{.sum = {nanoseconds(clock.error_s)}};
  for (const Part& part : own_parts(groups, clock.offset_s)) {
    report.sum.insert(report.sum.end(), {static_cast<std::int64_t>(part.operation),
                                         static_cast<std::int64_t>(part.party), part.step,
                                         part.begin_ns, part.end_ns});
  }
  WaitComparison comparison(groups.replicate.size(), groups.shard.size());
  comm::report_to_first(world, key, report, kAct, [&](int rank, const comm::Agreement& of_rank) {
    comparison.take(rank, of_rank.sum);
  });
  comm::Saying all;
  if (world.rank() == 0) all.sum = comparison.table(nanoseconds(now_s()));
  world.post(key + "/table", all);
  const std::vector<std::int64_t> numbers = world.collect(key + "/table", kAct).sum;
  WaitTable table{.waits = {},
                  .operations = numbers.at(0),
                  .steps = numbers.at(1),
                  .span_s = in_seconds(numbers.at(2)),
                  .clock_error_s = in_seconds(numbers.at(3))};
  if (numbers.at(4) >= 0) table.straggler = static_cast<int>(numbers.at(4));
  for (std::size_t i = 5; i + 3 <= numbers.size(); i += 3) {
    const auto awaited = static_cast<int>(numbers[i + 1]);
    const double seconds = in_seconds(numbers[i + 2]);
    if (awaited == kUnknownRank) {
      table.unexplained_s += seconds;
    } else {
      table.waits.push_back({static_cast<int>(numbers[i]), awaited, seconds});
    }
  }
  return table;
}

}  // namespace hsdp::reducer
