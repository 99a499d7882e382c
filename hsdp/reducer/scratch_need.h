// The scratch that a Reducer's tasks take at once, so that a step finds it reserved.
#pragma once

#include <cstddef>

#include "hsdp/bucket_layout.h"
#include "hsdp/reducer/parameter_table.h"

namespace hsdp::reducer {

// In bytes, of one rank: one task at a time, on one device.
[[nodiscard]] std::size_t scratch_need(const ParameterTable& parameters, const BucketLayout& layout,
                                       int slice_rank, Device device);

}  // namespace hsdp::reducer
