#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/device_row_pass.h"
#include "hsdp/kernels/device_wide_sum.h"

namespace hsdp::kernels {
namespace {

template <bool kSeveral, class Rows>
void run_rows(const DevicePass& pass, const Rows& rows, const Stream& stream) {
  const std::int64_t blocks = blocks_for(pass.groups());
  if (pass.row_dtype == Dtype::kF32) {
    launch(RowPassBody<Rows, 4, kSeveral>{pass, rows}, blocks, stream);
  } else {
    launch(RowPassBody<Rows, 2, kSeveral>{pass, rows}, blocks, stream);
  }
}

template <class T>
void sum_wide(const SumRows& args, const Stream& stream) {
  WideSumBody<T> body;
  body.rows = listed_rows(args.rows);
  body.row_count = static_cast<int>(args.rows.size());
  RowPass outs;
  outs.outs = args.outs;
  const DevicePass plan = plan_pass(outs, args.nonfinite);
  for (int o = 0; o < plan.out_count; ++o) body.outs[o] = static_cast<T*>(plan.outs[o]);
  body.out_count = plan.out_count;
  body.count = args.count;
  body.nonfinite = plan.nonfinite;
  launch(body, blocks_for(args.count), stream);
}

}  // namespace

void run_on_device(const RowPass& pass, std::atomic<std::uint32_t>* nonfinite,
                   const Stream& stream) {
  if (pass.count == 0) return;
  const DevicePass plan = plan_pass(pass, nonfinite);
  if (pass.rows.size() < 2) {
    run_rows<false>(plan, even_rows(pass.rows), stream);
  } else if (lie_evenly(pass.rows)) {
    run_rows<true>(plan, even_rows(pass.rows), stream);
  } else {
    run_rows<true>(plan, listed_rows(pass.rows), stream);
  }
}

void sum_wide_on_device(const SumRows& args, const Stream& stream) {
  if (args.count == 0) return;
  if (args.spec.row_dtype == Dtype::kF64) {
    sum_wide<double>(args, stream);
  } else {
    sum_wide<std::uint64_t>(args, stream);  // i64 wraps
  }
}

}  // namespace hsdp::kernels
