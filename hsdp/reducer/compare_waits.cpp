#include "hsdp/reducer/compare_waits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
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

// One rank's part in an operation, by the first rank's clock. A report is a clock error and then
// these, number by number.
struct Part {
  static constexpr std::size_t kNumbers = 4;
  std::uint64_t operation = 0;  // a digest
  OperationKind kind{};
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

bool is_compared(OperationKind kind) {
  return kind == OperationKind::kShardHop || kind == OperationKind::kReplicaHop ||
         kind == OperationKind::kGather || kind == OperationKind::kWord;
}

// Where a rank has two that cannot be told apart, neither is compared.
std::vector<Part> own_parts(const Groups& groups, double offset_s) {
  const auto contents = groups.world.engine()->control().operations()->read();
  std::map<std::uint64_t, std::vector<Part>> found;
  for (const RecordedOperation& one : contents.operations) {
    const OperationPlace& place = one.place;
    const auto source = contents.sources.find(one.source);
    if (!is_compared(place.kind) || source == contents.sources.end()) continue;
    if (source->second.ranks != groups.world.world_ranks()) continue;
    std::string numbers;
    for (const std::int64_t number :
         {place.step, place.microbatch, place.turn, static_cast<std::int64_t>(place.index)}) {
      numbers += std::to_string(number) + " ";
    }
    const std::uint64_t operation =
        digest_of({source->second.name, std::string(name(place.kind)), numbers});
    found[operation].push_back({operation, place.kind, nanoseconds(one.begin_s + offset_s),
                                one.state == OperationState::kBegun
                                    ? std::numeric_limits<std::int64_t>::max()
                                    : nanoseconds(one.end_s + offset_s)});
  }
  std::vector<Part> parts;
  for (const auto& [operation, same] : found) {
    if (same.size() == 1) parts.push_back(same.front());
  }
  return parts;
}

// On the first rank.
class WaitComparison {
 public:
  WaitComparison(int replicate, int shard) : replicate_(replicate), shard_(shard) {}

  void take(int rank, const std::vector<std::int64_t>& report) {
    errors_ns_.push_back(report.at(0));
    for (std::size_t i = 1; i + Part::kNumbers <= report.size(); i += Part::kNumbers) {
      const Part part{static_cast<std::uint64_t>(report[i]),
                      static_cast<OperationKind>(report[i + 1]), report[i + 2], report[i + 3]};
      parts_[{part.operation, group_of(part.kind, rank)}].emplace_back(rank, part);
    }
  }

  // How many were compared, the clocks' error, the straggler or -1, and a row for each wait.
  [[nodiscard]] std::vector<std::int64_t> table() {
    std::ranges::sort(errors_ns_, std::greater());
    error_ns_ = errors_ns_[0] + (errors_ns_.size() > 1 ? errors_ns_[1] : 0);
    const std::int64_t count = find_waits();
    for (const auto& [rank, waits] : waits_) {
      for (const Wait& wait : waits) share_out(rank, wait, 0);
    }
    std::erase_if(shares_, [&](const auto& one) { return one.second <= error_ns_; });
    std::map<int, std::int64_t> totals;
    for (const auto& [pair, share] : shares_) totals[pair.second] += share;
    const auto straggler =
        std::ranges::max_element(totals, {}, [](const auto& one) { return one.second; });
    std::vector<std::pair<std::pair<int, int>, std::int64_t>> rows(shares_.begin(), shares_.end());
    if (rows.size() > kMostRows) {
      std::ranges::sort(rows, std::greater(), [](const auto& row) { return row.second; });
      rows.resize(kMostRows);
      std::ranges::sort(rows);
    }
    std::vector<std::int64_t> numbers{count, error_ns_,
                                      straggler == totals.end() ? -1 : straggler->first};
    for (const auto& [pair, share] : rows) {
      numbers.insert(numbers.end(), {pair.first, pair.second, share});
    }
    return numbers;
  }

 private:
  struct Wait {
    int awaited = 0;
    std::int64_t from_ns = 0;
    std::int64_t to_ns = 0;
  };

  // How many operations were compared.
  [[nodiscard]] std::int64_t find_waits() {
    std::int64_t count = 0;
    for (const auto& [key, parts] : parts_) {
      const int size = size_of_group(parts.front().second.kind);
      if (size == 1 || static_cast<int>(parts.size()) != size) continue;
      ++count;
      const auto& [awaited, last] =
          *std::ranges::max_element(parts, {}, [](const auto& one) { return one.second.begin_ns; });
      for (const auto& [rank, part] : parts) {
        const Wait wait{awaited, part.begin_ns, std::min(last.begin_ns, part.end_ns)};
        if (wait.to_ns - wait.from_ns > error_ns_) waits_[rank].push_back(wait);
      }
    }
    for (auto& [rank, waits] : waits_) std::ranges::sort(waits, {}, &Wait::from_ns);
    return count;
  }

  // Where the awaited rank was late because it had waited itself, whom it waited for was meant.
  void share_out(int waiting, const Wait& wait, int links) {
    std::int64_t from_ns = wait.from_ns;
    const auto before = waits_.find(wait.awaited);
    if (before != waits_.end() && links < kMostLinks) {
      for (const Wait& one : before->second) {
        if (one.from_ns >= wait.to_ns) break;
        const Wait part{one.awaited, std::max(one.from_ns, from_ns),
                        std::min(one.to_ns, wait.to_ns)};
        const bool goes_on = one.to_ns > wait.to_ns + error_ns_;  // beside it, on another lane
        if (part.to_ns <= part.from_ns || goes_on || one.awaited == waiting) continue;
        shares_[{waiting, wait.awaited}] += part.from_ns - from_ns;
        share_out(waiting, part, links + 1);
        from_ns = part.to_ns;
      }
    }
    shares_[{waiting, wait.awaited}] += wait.to_ns - from_ns;
  }

  [[nodiscard]] int group_of(OperationKind kind, int rank) const {
    if (kind == OperationKind::kWord) return 0;
    return kind == OperationKind::kReplicaHop ? rank % shard_ : rank / shard_;
  }
  [[nodiscard]] int size_of_group(OperationKind kind) const {
    if (kind == OperationKind::kWord) return replicate_ * shard_;
    return kind == OperationKind::kReplicaHop ? replicate_ : shard_;
  }

  int replicate_;
  int shard_;
  std::vector<std::int64_t> errors_ns_;
  std::int64_t error_ns_ = 0;  // of the time between two ranks
  std::map<std::pair<std::uint64_t, int>, std::vector<std::pair<int, Part>>> parts_;
  std::map<int, std::vector<Wait>> waits_;              // by waiting rank
  std::map<std::pair<int, int>, std::int64_t> shares_;  // by waiting and awaited rank
};

}  // namespace

WaitTable compare_waits(Groups& groups) {
  Communicator& world = groups.world;
  static_cast<void>(world.exchange("", kAct));
  const std::string key = world.next_exchange_key();
  const comm::ClockOffset clock = comm::measure_clock(world, key + "/clock", Operations::now_s);
  comm::Saying report{.sum = {nanoseconds(clock.error_s)}};
  for (const Part& part : own_parts(groups, clock.offset_s)) {
    report.sum.insert(report.sum.end(),
                      {static_cast<std::int64_t>(part.operation),
                       static_cast<std::int64_t>(part.kind), part.begin_ns, part.end_ns});
  }
  WaitComparison comparison(groups.replicate.size(), groups.shard.size());
  comm::report_to_first(world, key, report, kAct, [&](int rank, const comm::Agreement& of_rank) {
    comparison.take(rank, of_rank.sum);
  });
  comm::Saying all;
  if (world.rank() == 0) all.sum = comparison.table();
  world.post(key + "/table", all);
  const std::vector<std::int64_t> numbers = world.collect(key + "/table", kAct).sum;
  WaitTable table{.waits = {},
                  .operations = numbers.at(0),
                  .clock_error_s = static_cast<double>(numbers.at(1)) * kNanosecond};
  if (numbers.at(2) >= 0) table.straggler = static_cast<int>(numbers.at(2));
  for (std::size_t i = 3; i + 3 <= numbers.size(); i += 3) {
    table.waits.push_back({static_cast<int>(numbers[i]), static_cast<int>(numbers[i + 1]),
                           static_cast<double>(numbers[i + 2]) * kNanosecond});
  }
  return table;
}

}  // namespace hsdp::reducer
