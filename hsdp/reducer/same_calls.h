// Checks that all ranks have made the same planned calls for their buckets or rows, which no other
// part compares [Note: planned calls].
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/hop_owner.h"
#include "hsdp/reducer/step_agreement.h"

namespace hsdp::reducer {

// The calls of this rank on its shard group and on its hop's groups, if it has a hop.
[[nodiscard]] std::string calls_of(const Groups& groups, const HopOwner* hop);

// Collective. `calls`: that text of all ranks, in their order. Ends the world and throws if those
// of the shard group, or of the ranks with the same shard, differ. Called before the result is
// valid.
void require_same_calls(const Groups& groups, HopOwner* hop, StepAgreement& agreement,
                        std::int64_t step, const std::vector<std::string>& calls);

}  // namespace hsdp::reducer
