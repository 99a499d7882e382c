#include "hsdp/reducer/replica_check.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/kernels/digest.h"

namespace hsdp::reducer {
namespace {

Buffer pinned_words(Device device, std::size_t count) {
  return {device, count * sizeof(std::uint64_t), Buffer::Place::kPinnedHost};
}

std::uint64_t* words_of(const Buffer& buffer) {
  return reinterpret_cast<std::uint64_t*>(buffer.data());
}

}  // namespace

ReplicaCheck::ReplicaCheck(std::int64_t every, const ParameterTable& parameters,
                           const BucketLayout& layout, const GradientMemory& memory,
                           const Groups& groups)
    : every_(every), parameters_(parameters), layout_(layout), memory_(memory), groups_(groups) {
  if (every > 0 && groups.replicate.size() > 1) digest_ = pinned_words(groups.device, 1);
}

void ReplicaCheck::take(const Stream& stream) {
  std::uint64_t* const sum = words_of(digest_);
  *sum = 0;
  std::uint64_t place = 0;
  for (int b = 0; b < static_cast<int>(layout_.buckets().size()); ++b) {
    const TensorView row = memory_.bucket_result(b);
    kernels::add_digest(row, place, sum, stream);
    place += kernels::digest_places(row);
  }
}

// The largest complement is that of the smallest digest.
std::vector<std::int64_t> ReplicaCheck::claim() const {
  std::vector<std::int64_t> most(2 * static_cast<std::size_t>(groups_.shard.size()),
                                 std::numeric_limits<std::int64_t>::min());
  const auto own = std::bit_cast<std::int64_t>(*words_of(digest_));
  const auto place = 2 * static_cast<std::size_t>(groups_.shard.rank());
  most[place] = own;
  most[place + 1] = ~own;
  return most;
}

std::vector<ReplicaCheck::Run> ReplicaCheck::runs() const {
  std::vector<Run> all;
  for (int b = 0; b < static_cast<int>(layout_.buckets().size()); ++b) {
    for (const ParameterRange& range : layout_.ranges(b, groups_.shard.rank())) {
      all.push_back({b, range});
    }
  }
  return all;
}

std::vector<std::optional<std::string>> ReplicaCheck::digests(std::span<const Run> runs) const {
  const Buffer sums = pinned_words(groups_.device, runs.size() + 1);
  Stream stream =
      groups_.on_host() ? Stream::inline_host() : Stream::create(groups_.device, "hsdp-check");
  std::uint64_t* sum = words_of(sums);
  for (const Run& run : runs) {
    const TensorView row = memory_.bucket_result(run.bucket);
    kernels::add_digest(row.slice(run.range.offset, run.range.count), 0, sum++, stream);
  }
  stream.synchronize();
  std::vector<std::optional<std::string>> texts;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    texts.emplace_back(std::to_string(words_of(sums)[i]));
  }
  return texts;
}

comm::Failure ReplicaCheck::find_difference(std::int64_t step, const std::string& key) {
  const std::vector<Run> own = runs();
  groups_.replicate.post(key, {.equal = digests(own)});
  const comm::Agreement all = groups_.replicate.collect(key, "replica results");
  const auto place = std::ranges::find_if(
      all.places, [](const comm::Agreement::Place& one) { return one.said.size() > 1; });
  Message message{.where = "reducer: verify_every",
                  .expected = "the same result on all replicas in step " + std::to_string(step),
                  .got = "others, which were the same at a second look",
                  .remedy =
                      "look for a fault of memory, GPU or link, and go on from a checkpoint "
                      "of before that step"};
  if (place == all.places.end()) return {comm::FailureKind::kMismatch, message.text(), {}};
  const Run& run = own[static_cast<std::size_t>(place - all.places.begin())];
  const std::vector<int> world = groups_.world.world_ranks();
  const auto text_of = [&world](const std::vector<int>& ranks) {
    std::vector<int> places;
    places.reserve(ranks.size());
    for (const int rank : ranks) {
      places.push_back(static_cast<int>(std::ranges::find(world, rank) - world.begin()));
    }
    return comm::ranks_text(places, static_cast<int>(world.size()));
  };
  std::string got;
  std::vector<int> ranks;
  const auto& most = *std::ranges::max_element(place->said, {}, &comm::Agreement::Said::count);
  const auto equally_many =
      std::ranges::count(place->said, most.count, &comm::Agreement::Said::count);
  for (const comm::Agreement::Said& said : place->said) {
    if (equally_many == 1 && &said == &most) continue;
    got += (got.empty() ? "" : ", others on ") + text_of(said.ranks);
    ranks.insert(ranks.end(), said.ranks.begin(), said.ranks.end());
  }
  std::ranges::sort(ranks);
  message.expected = "the same result of '" + parameters_.spec(run.range.parameter).name +
                     "' in bucket " + std::to_string(run.bucket) + " on all replicas in step " +
                     std::to_string(step);
  message.got = "other bits on " + got;
  message.got += equally_many == 1 ? " than on the rest" : ", as many on each side";
  return {comm::FailureKind::kMismatch, message.text(), ranks};
}

void ReplicaCheck::require_equal(std::int64_t step, std::span<const std::int64_t> most,
                                 StepAgreement& agreement) {
  const auto differs = [&most](int shard_rank) {
    const auto i = 2 * static_cast<std::size_t>(shard_rank);
    return most[i] != ~most[i + 1];
  };
  bool any = false;
  for (int r = 0; r < groups_.shard.size(); ++r) any |= differs(r);
  if (!any) return;
  const std::string key = agreement.key("results", step);
  const int own = groups_.shard.rank();
  comm::Saying mine;  // all take that of the lowest rank that found a difference
  if (differs(own)) {
    const comm::Failure found = find_difference(step, key + "/" + std::to_string(own));
    for (const int rank : found.ranks) mine.note += std::to_string(rank) + " ";
    mine.note += "\n" + found.message;
  }
  groups_.world.post(key, mine);
  const std::string note = groups_.world.collect(key, "replica results").note;
  const std::size_t end = note.find('\n');
  std::istringstream numbers(note.substr(0, end));
  agreement.end_world({.kind = comm::FailureKind::kMismatch,
                       .message = note.substr(end + 1),
                       .ranks = {std::istream_iterator<int>(numbers), {}}});
}

}  // namespace hsdp::reducer
