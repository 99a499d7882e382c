// This rank's slice of a parameter as it is kept between gathers: in fp32, from which it is rounded
// into the whole array, or in the array's own dtype.
#pragma once

#include <cstdint>
#include <string>

#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::zero {

// UsageError of `where` unless it is a fp32 slice of so many elements that can be rounded to an
// array of `dtype`, both on `device`.
void require_master(const std::string& where, const TensorView& master, std::int64_t count,
                    Dtype dtype, Device device);

// Inside a task of `stream`: the slice into its place in the whole array.
void round_into(const TensorView& stored, const TensorView& place, Stream& stream);

}  // namespace hsdp::zero
