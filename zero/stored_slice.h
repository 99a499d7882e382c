// This rank's slice of a parameter between gathers: in fp32, which is rounded into the whole array,
// or in the array's dtype.
#pragma once

#include <cstdint>
#include <string>

#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::zero {

// UsageError that begins with `where`, unless `master` is an fp32 slice of `count` elements on
// `device` that can be rounded to `dtype`.
void require_master(const std::string& where, const TensorView& master, std::int64_t count,
                    Dtype dtype, Device device);

// Inside a task of `stream`: rounds the slice into its place in the whole array.
void round_into(const TensorView& stored, const TensorView& place, Stream& stream);

}  // namespace hsdp::zero
