// Whether all ranks have made the same planned calls for their buckets or rows, which are compared
// nowhere else [Note: planned calls].
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/hop_owner.h"
#include "hsdp/reducer/step_agreement.h"

namespace hsdp::reducer {

// What this rank has called on its shard group and, where it has one, on its hop's groups.
[[nodiscard]] std::string calls_of(const Groups& groups, const HopOwner* hop);

// Given that text of all ranks, in their order: ends the world and throws where those of the shard
// group or of the same shard differ. Collective, before the step's result is known to be one.
void require_same_calls(const Groups& groups, HopOwner* hop, StepAgreement& agreement,
                        std::int64_t step, const std::vector<std::string>& calls);

}  // namespace hsdp::reducer
