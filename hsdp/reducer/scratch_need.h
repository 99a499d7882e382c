// The scratch that a Reducer's tasks take, which is reserved before the first step.
#pragma once

#include <cstddef>

#include "hsdp/bucket_layout.h"
#include "hsdp/reducer/parameter_table.h"

namespace hsdp::reducer {

// In bytes, of one rank, whose tasks run one at a time.
[[nodiscard]] std::size_t scratch_need(const ParameterTable& parameters, const BucketLayout& layout,
                                       int slice_rank, Device device);

}  // namespace hsdp::reducer
