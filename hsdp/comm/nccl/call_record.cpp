#include "hsdp/comm/nccl/call_record.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "hsdp/comm/control/world_end.h"

namespace hsdp::comm {
namespace {

constexpr std::size_t kKept = 4096;
constexpr std::size_t kTold = 16;                     // calls before one, and after it
constexpr std::size_t kShown = std::size_t{8} << 20;  // bytes, of all members together

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
      .add(call.planned)
      .value();
}

}  // namespace

CallRecord::CallRecord(std::shared_ptr<Control> control, const std::string& group,
                       std::vector<int> members)
    : control_(std::move(control)), topic_("calls/" + group), members_(std::move(members)) {
  listening_ =
      control_->listen(topic_, [this](int from, std::string_view message) { hear(from, message); });
}

// A rank that asks and one that does not wait for each other, too.
void CallRecord::add(const HostCall& call, bool asks) {
  const std::lock_guard lock(mutex_);
  const Entry last = entries_.empty() ? Entry{} : entries_.back();
  entries_.push_back({last.sequence + 1, hash_with(last.hash + (asks ? 1 : 0), call), call});
  if (entries_.size() > kKept) entries_.pop_front();
  if (call.planned != 0) planned_hash_ = hash_with(planned_hash_, call);
}

std::uint64_t CallRecord::planned_hash() const {
  const std::lock_guard lock(mutex_);
  return planned_hash_;
}

std::string CallRecord::text_of(std::span<const Entry> entries) {
  std::string text(entries.size_bytes(), '\0');
  if (!text.empty()) std::memcpy(text.data(), entries.data(), text.size());
  return text;
}

std::vector<CallRecord::Entry> CallRecord::entries_in(std::string_view text) {
  std::vector<Entry> entries(text.size() / sizeof(Entry));
  if (!entries.empty()) std::memcpy(entries.data(), text.data(), entries.size() * sizeof(Entry));
  return entries;
}

std::string CallRecord::text() const {
  const std::lock_guard lock(mutex_);
  const std::size_t most = kShown / sizeof(Entry) / members_.size();
  const std::size_t count = std::min(entries_.size(), most);
  const std::vector<Entry> last(entries_.end() - static_cast<std::ptrdiff_t>(count),
                                entries_.end());
  return text_of(last);
}

// Two neighbours are enough: where not all members made the same call, some two neighbours did not.
void CallRecord::tell_of_wait(std::uint64_t sequence) const {
  std::vector<Entry> told;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::ranges::lower_bound(entries_, sequence, {}, &Entry::sequence);
    const auto before = std::min<std::ptrdiff_t>(kTold, at - entries_.begin());
    const auto after = std::min<std::ptrdiff_t>(kTold, entries_.end() - at);
    told.assign(at - before, at + after);
  }
  const std::string message = text_of(told);
  const std::size_t size = members_.size();
  const auto own =
      static_cast<std::size_t>(std::ranges::find(members_, control_->rank()) - members_.begin());
  control_->tell(members_[(own + 1) % size], topic_, message);
  if (size > 2) control_->tell(members_[(own + size - 1) % size], topic_, message);
}

void CallRecord::hear(int from, std::string_view message) const {
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

std::optional<Failure> CallRecord::difference(std::span<const int> ranks,
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
    if (std::ranges::any_of(calls, differs)) return mismatch(calls, callers, "nccl");
    if (!after) after = first.call;
  }
  if (!after) return std::nullopt;
  return Failure{.kind = FailureKind::kMismatch,
                 .message = "nccl: the ranks' calls do not match: expected equal ones before " +
                            to_string(*after) + ", got other ones on " +
                            ranks_text({ranks.begin(), ranks.end()}, control_->size()) +
                            "; make the same calls in the same order on every rank",
                 .ranks = {ranks.begin(), ranks.end()}};
}

}  // namespace hsdp::comm
