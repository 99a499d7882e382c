#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/device_row_pass.h"
#include "hsdp/kernels/device_wide_pass.h"

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

template <class T, class Rows>
void run_wide_rows(const RowPass& pass, const Rows& rows, std::atomic<std::uint32_t>* nonfinite,
                   const Stream& stream) {
  WidePassBody<T, Rows> body;
  body.rows = rows;
  body.row_count = static_cast<int>(pass.rows.size());
  const DevicePass plan = plan_pass(pass, nonfinite);
  body.add = static_cast<const T*>(plan.add);
  body.divisor = pass.wide_divisor;
  body.multiplier = pass.wide_multiplier;
  for (int o = 0; o < plan.out_count; ++o) body.outs[o] = static_cast<T*>(plan.outs[o]);
  body.out_count = plan.out_count;
  body.count = pass.count;
  body.nonfinite = plan.nonfinite;
  launch(body, blocks_for(pass.count), stream);
}

template <class T>
void run_wide(const RowPass& pass, std::atomic<std::uint32_t>* nonfinite, const Stream& stream) {
  if (lie_evenly(pass.rows)) {
    run_wide_rows<T>(pass, even_rows(pass.rows), nonfinite, stream);
  } else {
    run_wide_rows<T>(pass, listed_rows(pass.rows), nonfinite, stream);
  }
}

}  // namespace

void run_on_device(const RowPass& pass, std::atomic<std::uint32_t>* nonfinite,
                   const Stream& stream) {
  if (pass.count == 0) return;
  if (is_wide(pass)) return run_wide<double>(pass, nonfinite, stream);
  const DevicePass plan = plan_pass(pass, nonfinite);
  if (pass.rows.size() < 2) {
    run_rows<false>(plan, even_rows(pass.rows), stream);
  } else if (lie_evenly(pass.rows)) {
    run_rows<true>(plan, even_rows(pass.rows), stream);
  } else {
    run_rows<true>(plan, listed_rows(pass.rows), stream);
  }
}

void sum_integers_on_device(const SumRows& args, const Stream& stream) {
  if (args.count == 0) return;
  RowPass pass;
  pass.rows = args.rows;
  pass.row_dtype = pass.out_dtype = Dtype::kF64;  // the same element size
  pass.outs = args.outs;
  pass.count = args.count;
  run_wide<std::uint64_t>(pass, nullptr, stream);  // i64 wraps
}

}  // namespace hsdp::kernels
