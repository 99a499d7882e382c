// Cuts a group into smaller ones.
#pragma once

#include <memory>

#include "hsdp/comm/nccl/nccl_group.h"

namespace hsdp::comm {

// Collective over `group`: ranks of one color, ordered by (key, rank). A negative color gets
// nullptr. NCCL hears of it only where a group of two or more comes out.
[[nodiscard]] std::unique_ptr<NcclGroup> split_group(NcclGroup& group, int color, int key);

}  // namespace hsdp::comm
