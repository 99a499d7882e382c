#include "zero/stored_slice.h"

#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::zero {

void require_master(const std::string& where, const TensorView& master, std::int64_t count,
                    Dtype dtype, Device device) {
  const Dtype own = sum_dtype(dtype);
  if (master.count != count || master.dtype != own || master.device != device) {
    const ConstTensorView wanted(nullptr, count, own, device);
    throw UsageError({.where = where,
                      .expected = to_string(wanted) + ", this rank's slice",
                      .got = to_string(master)});
  }
  if (!is_gradient_dtype(dtype)) {
    throw UsageError({.where = where,
                      .expected = "an array of f32, bf16, f16 or f64, to which it is rounded",
                      .got = std::string(name(dtype))});
  }
}

void round_into(const TensorView& stored, const TensorView& place, Stream& stream) {
  if (stored.dtype == place.dtype) {
    copy_bytes(place.data, stored.data, stored.size_in_bytes(), stream);
    return;
  }
  kernels::ScaleAndCast args;
  args.in = stored.data;
  args.out = place.data;
  args.out_dtype = place.dtype;
  args.count = stored.count;
  kernels::scale_and_cast(args, stream);
}

}  // namespace hsdp::zero
