#include "hsdp/comm/planned_calls.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/host/host_wait.h"

namespace hsdp::comm {
namespace {

constexpr std::size_t kKept = 4096;
constexpr std::size_t kTold = 16;                     // calls shown before one, and after it
constexpr std::size_t kShown = std::size_t{8} << 20;  // bytes, for all members together

std::uint64_t hash_with(std::uint64_t hash, const HostCall& call) {
  return TermsHash()
      .add(hash)
      .add(static_cast<std::uint64_t>(call.operation))
      .add(static_cast<std::uint64_t>(call.count))
      .add(static_cast<std::uint64_t>(call.dtype))
      .add(static_cast<std::uint64_t>(call.wire))
      .add(call.terms)
      .add(static_cast<std::uint64_t>(call.bucket))
      .add(static_cast<std::uint64_t>(call.root))
      .add(static_cast<std::uint64_t>(call.kind))
      .value();
}

}  // namespace

PlannedCalls::PlannedCalls(std::shared_ptr<Control> control, std::string group,
                           std::vector<int> members, std::string engine)
    : control_(std::move(control)),
      group_(std::move(group)),
      members_(std::move(members)),
      engine_(std::move(engine)) {
  listening_ = control_->listen(
      topic(), [this](int from, std::string_view message) { hear(from, message); });
}

// Hash whether this rank compares: it would wait for a rank that does not.
std::optional<std::uint32_t> PlannedCalls::begin(const HostCall& call) {
  const std::lock_guard lock(mutex_);
  const auto agreed =
      call.kind == CallKind::kPlanned ? agreed_.find(bytes_of(call)) : agreed_.end();
  const bool asks = agreed == agreed_.end();
  const Entry last = entries_.empty() ? Entry{} : entries_.back();
  entries_.push_back({last.sequence + 1, hash_with(last.hash + (asks ? 1 : 0), call), call});
  if (entries_.size() > kKept) entries_.pop_front();
  if (call.kind == CallKind::kPlanned) hash_ = hash_with(hash_, call);
  if (asks) return std::nullopt;
  return agreed->second;
}

void PlannedCalls::agreed(const HostCall& call, std::uint32_t word) {
  if (call.kind != CallKind::kPlanned) return;
  const std::lock_guard lock(mutex_);
  agreed_.emplace(bytes_of(call), word);
}

void PlannedCalls::forget() {
  const std::lock_guard lock(mutex_);
  agreed_.clear();
}

std::uint64_t PlannedCalls::sequence() const {
  const std::lock_guard lock(mutex_);
  return entries_.empty() ? 0 : entries_.back().sequence;
}

std::uint64_t PlannedCalls::hash() const {
  const std::lock_guard lock(mutex_);
  return hash_;
}

std::string PlannedCalls::text_of(std::span<const Entry> entries) {
  std::string text(entries.size_bytes(), '\0');
  if (!text.empty()) std::memcpy(text.data(), entries.data(), text.size());
  return text;
}

std::vector<PlannedCalls::Entry> PlannedCalls::entries_in(std::string_view text) {
  std::vector<Entry> entries(text.size() / sizeof(Entry));
  if (!entries.empty()) std::memcpy(entries.data(), text.data(), entries.size() * sizeof(Entry));
  return entries;
}

std::string PlannedCalls::text() const {
  const std::lock_guard lock(mutex_);
  const std::size_t most = kShown / sizeof(Entry) / members_.size();
  const std::size_t count = std::min(entries_.size(), most);
  const std::vector<Entry> last(entries_.end() - static_cast<std::ptrdiff_t>(count),
                                entries_.end());
  return text_of(last);
}

// Two neighbours are enough: if not all members made the same call, some two neighbours differ.
void PlannedCalls::tell_of_wait(std::uint64_t sequence) const {
  const std::size_t size = members_.size();
  const auto own =
      static_cast<std::size_t>(std::ranges::find(members_, control_->rank()) - members_.begin());
  tell(sequence, members_[(own + 1) % size]);
  if (size > 2) tell(sequence, members_[(own + size - 1) % size]);
}

void PlannedCalls::tell(std::uint64_t sequence, int member) const {
  std::vector<Entry> told;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::ranges::lower_bound(entries_, sequence, {}, &Entry::sequence);
    const auto before = std::min<std::ptrdiff_t>(kTold, at - entries_.begin());
    const auto after = std::min<std::ptrdiff_t>(kTold, entries_.end() - at);
    told.assign(at - before, at + after);
  }
  control_->tell(member, topic(), text_of(told));
}

// The member did not compare; it knows what it called.
void PlannedCalls::end_by_data(int member, WaitState waiting) const {
  tell(sequence(), member);
  wait_for_verdict(*control_, std::chrono::seconds(2));
  end_world(*control_,
            {.kind = FailureKind::kMismatch,
             .message = engine_ + ": the ranks' calls do not match: expected " +
                        operation_text(waiting.operation, waiting.bucket) + " on every rank, got " +
                        "data of another call from " + ranks_text({member}, control_->size()) +
                        "; make the same calls in the same order on every rank",
             .ranks = {member}},
            waiting);
}

void PlannedCalls::compare(const std::string& key) const {
  const WaitState waiting{.operation = "compare calls"};
  std::vector<int> ascending = members_;
  std::ranges::sort(ascending);
  const auto texts = control_->exchange(group_ + "/calls/" + key, ascending, text(), waiting);
  if (const auto failure = difference(ascending, texts)) end_world(*control_, *failure, waiting);
}

void PlannedCalls::hear(int from, std::string_view message) const {
  std::vector<Entry> all;
  {
    const std::lock_guard lock(mutex_);
    all.assign(entries_.begin(), entries_.end());
  }
  std::array ranks{control_->rank(), from};
  std::array texts{text_of(all), std::string(message)};
  if (from < ranks.front()) {
    std::ranges::reverse(ranks);
    std::ranges::reverse(texts);
  }
  if (const auto failure = difference(ranks, texts)) control_->fail(*failure);
}

std::optional<Failure> PlannedCalls::difference(std::span<const int> ranks,
                                                std::span<const std::string> texts) const {
  std::vector<std::vector<Entry>> of_ranks;
  for (const std::string& text : texts) of_ranks.push_back(entries_in(text));
  std::optional<HostCall> after;  // an earlier difference
  for (const Entry& first : of_ranks.front()) {
    std::vector<HostCall> calls;
    std::vector<int> callers;
    bool same = true;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const auto at = std::ranges::lower_bound(of_ranks[r], first.sequence, {}, &Entry::sequence);
      if (at == of_ranks[r].end() || at->sequence != first.sequence) continue;
      calls.push_back(at->call);
      callers.push_back(ranks[r]);
      same = same && at->hash == first.hash;
    }
    if (same) continue;
    const auto differs = [&first](const HostCall& call) { return !agrees(call, first.call); };
    if (std::ranges::any_of(calls, differs)) return mismatch(calls, callers, engine_);
    if (!after) after = first.call;
  }
  if (!after) return std::nullopt;
  return Failure{.kind = FailureKind::kMismatch,
                 .message = engine_ +
                            ": the ranks' calls do not match: expected equal ones before " +
                            to_string(*after) + ", got other ones on " +
                            ranks_text({ranks.begin(), ranks.end()}, control_->size()) +
                            "; make the same calls in the same order on every rank",
                 .ranks = {ranks.begin(), ranks.end()}};
}

}  // namespace hsdp::comm
