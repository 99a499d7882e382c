#include "hsdp/reducer/digest_comparison.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

constexpr std::string_view kWaiting = "verify_every";

std::string text_of(const std::vector<int>& ranks, const std::vector<int>& world) {
  std::vector<int> places;
  places.reserve(ranks.size());
  for (const int rank : ranks) {
    places.push_back(static_cast<int>(std::ranges::find(world, rank) - world.begin()));
  }
  return comm::ranks_text(places, static_cast<int>(world.size()));
}

}  // namespace

Digests::Digests(Device device, std::size_t count)
    : memory_(device, count * sizeof(std::uint64_t), Buffer::Place::kPinnedHost) {}

void Digests::clear() { std::fill_n(at(0), count(), 0); }

std::uint64_t Digests::together(std::size_t first, std::size_t count) const {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15U;  // odd, so that all bits of a digest count
  std::uint64_t whole = 0;
  for (std::size_t i = first; i < first + count; ++i) whole = whole * kOdd + *at(i);
  return whole;
}

std::vector<std::optional<std::string>> Digests::texts() const {
  std::vector<std::optional<std::string>> all;
  for (std::size_t i = 0; i < count(); ++i) all.emplace_back(std::to_string(*at(i)));
  return all;
}

// The maximum of the complements is the complement of the smallest digest.
std::vector<std::int64_t> claims(std::span<const std::optional<std::uint64_t>> digests) {
  std::vector<std::int64_t> most;
  for (const std::optional<std::uint64_t>& digest : digests) {
    const auto own = std::bit_cast<std::int64_t>(digest.value_or(0));
    constexpr std::int64_t kNothing = std::numeric_limits<std::int64_t>::min();
    most.push_back(digest ? own : kNothing);
    most.push_back(digest ? ~own : kNothing);
  }
  return most;
}

bool differs(std::span<const std::int64_t> most, std::size_t place) {
  const std::int64_t largest = most[2 * place];
  const std::int64_t complement = most[2 * place + 1];
  return largest != ~complement && std::max(largest, complement) >= 0;
}

std::optional<DigestDifference> find_difference(Communicator& group, const Communicator& world,
                                                const std::string& key,
                                                std::vector<std::optional<std::string>> digests) {
  group.post(key, {.equal = std::move(digests)});
  const comm::Agreement all = group.collect(key, kWaiting);
  const auto place = std::ranges::find_if(
      all.places, [](const comm::Agreement::Place& one) { return one.said.size() > 1; });
  if (place == all.places.end()) return std::nullopt;
  DigestDifference found{.place = static_cast<std::size_t>(place - all.places.begin())};
  const auto& most = *std::ranges::max_element(place->said, {}, &comm::Agreement::Said::count);
  const auto equally_many =
      std::ranges::count(place->said, most.count, &comm::Agreement::Said::count);
  const std::vector<int>& ranks = world.world_ranks();
  for (const comm::Agreement::Said& said : place->said) {
    if (equally_many == 1 && &said == &most) continue;
    found.text += (found.text.empty() ? "other bits on " : ", others on ");
    found.text += text_of(said.ranks, ranks);
    found.ranks.insert(found.ranks.end(), said.ranks.begin(), said.ranks.end());
  }
  std::ranges::sort(found.ranks);
  found.text += equally_many == 1 ? " than on the rest" : ", as many on each side";
  return found;
}

std::vector<std::int64_t> row_claims(const Groups& groups, std::uint64_t digest) {
  std::vector<std::optional<std::uint64_t>> digests(static_cast<std::size_t>(groups.shard.size()));
  digests[static_cast<std::size_t>(groups.shard.rank())] = digest;
  return claims(digests);
}

void require_equal_rows(std::int64_t step, std::span<const std::int64_t> most, Groups& groups,
                        StepAgreement& agreement, const ComparedRows& rows) {
  bool any = false;
  for (std::size_t place = 0; place < most.size() / 2; ++place) any |= differs(most, place);
  if (!any) return;
  const std::string key = agreement.key("results", step);
  const auto own = static_cast<std::size_t>(groups.shard.rank());
  comm::Saying mine;  // every rank raises what the lowest rank with a difference says
  if (differs(most, own)) {
    const auto found = find_difference(groups.replicate, groups.world,
                                       key + "/" + std::to_string(own), rows.digests());
    Message message{.where = rows.owner + ": verify_every",
                    .expected = "the same result on all replicas in step " + std::to_string(step),
                    .got = "others, which were the same at a second look",
                    .remedy = kDifferenceRemedy};
    if (found) {
      message.expected = "the same result of " + rows.name(found->place) +
                         " on all replicas in step " + std::to_string(step);
      message.got = found->text;
      for (const int rank : found->ranks) mine.note += std::to_string(rank) + " ";
    }
    mine.note += "\n" + message.text();
  }
  groups.world.post(key, mine);
  const std::string note = groups.world.collect(key, kWaiting).note;
  const std::size_t end = note.find('\n');
  std::istringstream numbers(note.substr(0, end));
  agreement.end_world({.kind = comm::FailureKind::kMismatch,
                       .message = note.substr(end + 1),
                       .ranks = {std::istream_iterator<int>(numbers), {}}});
}

}  // namespace hsdp::reducer
