// Splits a group into smaller ones.
#pragma once

#include <memory>

#include "hsdp/comm/nccl/nccl_group.h"

namespace hsdp::comm {

// Collective over `group`: ranks of one color, ordered by (key, rank). Returns nullptr for a
// negative color. NCCL takes part only if a new group has at least two ranks.
[[nodiscard]] std::unique_ptr<NcclGroup> split_group(NcclGroup& group, int color, int key);

}  // namespace hsdp::comm
