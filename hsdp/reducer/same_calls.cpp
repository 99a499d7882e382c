#include "hsdp/reducer/same_calls.h"

#include <cstddef>
#include <string_view>

namespace hsdp::reducer {

std::string calls_of(const Groups& groups, const HopOwner* hop) {
  return calls_text(groups.shard) + "/" + (hop == nullptr ? std::string() : hop->calls());
}

void require_same_calls(const Groups& groups, HopOwner* hop, StepAgreement& agreement,
                        std::int64_t step, const std::vector<std::string>& calls) {
  const auto shard_size = static_cast<std::size_t>(groups.shard.size());
  const auto own = static_cast<std::size_t>(groups.world.rank());
  const auto part = [&](std::size_t rank, bool of_hop) {
    const std::string_view text = calls[rank];
    return of_hop ? text.substr(text.find('/') + 1) : text.substr(0, text.find('/'));
  };
  bool shard_differs = false;
  bool hop_differs = false;
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (r / shard_size == own / shard_size) shard_differs |= part(r, false) != part(own, false);
    if (r % shard_size == own % shard_size) hop_differs |= part(r, true) != part(own, true);
  }
  const std::string key = std::to_string(step);
  if (shard_differs) Communicator(groups.shard).compare_calls(key);
  if (hop_differs) hop->compare_calls(key);
  if (!shard_differs && !hop_differs) return;
  // The first difference is too old to be kept, or lies in the last calls.
  agreement.end_world(
      {.kind = comm::FailureKind::kMismatch,
       .message = "reducer: expected the same collectives of its buckets or rows on every rank in "
                  "step " +
                  key + ", got other ones; a replica hop has to make the same calls on all ranks",
       .ranks = {}});
}

}  // namespace hsdp::reducer
