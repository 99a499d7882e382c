#include "hsdp/reducer/replica_check.h"

#include <string>

#include "hsdp/kernels/digest.h"

namespace hsdp::reducer {

ReplicaCheck::ReplicaCheck(std::int64_t every, const ParameterTable& parameters,
                           const BucketLayout& layout, const GradientMemory& memory,
                           const Groups& groups)
    : every_(every), parameters_(parameters), layout_(layout), memory_(memory), groups_(groups) {
  if (every > 0 && groups.replicate.size() > 1) digest_ = Digests(groups.device, 1);
}

void ReplicaCheck::take(const Stream& stream) {
  digest_.clear();
  std::uint64_t place = 0;
  for (int b = 0; b < static_cast<int>(layout_.buckets().size()); ++b) {
    const TensorView row = memory_.bucket_result(b);
    kernels::add_digest(row, place, digest_.at(0), stream);
    place += kernels::digest_places(row);
  }
}

std::vector<std::int64_t> ReplicaCheck::claim() const {
  return row_claims(groups_, *digest_.at(0));
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
  const Digests digests(groups_.device, runs.size() + 1);
  Stream stream =
      groups_.on_host() ? Stream::inline_host() : Stream::create(groups_.device, "hsdp-check");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const TensorView row = memory_.bucket_result(runs[i].bucket);
    kernels::add_digest(row.slice(runs[i].range.offset, runs[i].range.count), 0, digests.at(i),
                        stream);
  }
  stream.synchronize();
  return digests.texts();
}

void ReplicaCheck::require_equal(std::int64_t step, std::span<const std::int64_t> most,
                                 StepAgreement& agreement) {
  const std::vector<Run> own = runs();
  require_equal_rows(step, most, groups_, agreement,
                     {.owner = "reducer",
                      .digests = [&] { return digests(own); },
                      .name =
                          [&](std::size_t place) {
                            const Run& run = own[place];
                            return "'" + parameters_.spec(run.range.parameter).name +
                                   "' in bucket " + std::to_string(run.bucket);
                          }});
}

}  // namespace hsdp::reducer
