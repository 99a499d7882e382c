#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_pack.h"
#include "hsdp/kernels/device_pack_list.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/device_tiles.h"
#include "hsdp/kernels/device_wide_pass.h"

namespace hsdp::kernels {
namespace {

template <int kElementBytes>
void pack(const PackPlan& plan, const Stream& stream) {
  if (plan.tiled) {
    launch(TileBody<kElementBytes>{plan.pass, plan.gradient, plan.tiles}, plan.tiles.tile_count,
           stream);
  } else {
    launch(GatherBody<kElementBytes>{plan.pass, plan.gradient, plan.gather},
           blocks_for(groups_over(plan.pass.count)), stream);
  }
}

template <int kElementBytes>
void pack_list(const PackKind& kind, std::span<const PackItem> items, const Stream& stream) {
  PackListBody<kElementBytes> body;
  body.kind = kind;
  for (const PackItem& item : items) {
    PackItem& placed = body.items[body.item_count++] = item;
    placed.first_unit = body.unit_count;
    body.unit_count += static_cast<std::uint32_t>(body.units_of(item.count));
  }
  launch(body, body.unit_count, stream);
}

// For f64, whose scale is 1.
WidePassBody<double> wide_pack(const void* gradient, const void* add, const void* base, void* out,
                               std::int64_t count) {
  WidePassBody<double> body;
  body.rows.first = static_cast<const char*>(gradient);
  body.row_count = gradient != nullptr ? 1 : 0;
  body.add = static_cast<const double*>(add);
  body.base = static_cast<const double*>(base);
  body.outs[0] = static_cast<double*>(out);
  body.out_count = 1;
  body.count = count;
  return body;
}

}  // namespace

void pack_list_on_device(const PackKind& kind, std::span<const PackItem> items,
                         const Stream& stream) {
  if (kind.dtype == Dtype::kF64) {
    for (const PackItem& item : items) {
      launch(wide_pack(item.gradient, item.add, item.base, item.out, item.count),
             blocks_for(item.count), stream);
    }
  } else if (kind.dtype == Dtype::kF32) {
    pack_list<4>(kind, items, stream);
  } else {
    pack_list<2>(kind, items, stream);
  }
}

void pack_on_device(const CastAndPack& args, const Stream& stream) {
  if (args.count == 0) return;
  const PackPlan plan = plan_pack(args);
  if (plan.pass.row_dtype == Dtype::kF64) {
    WidePassBody<double> body = wide_pack(plan.gradient, args.add, args.base, args.out, args.count);
    body.gather = plan.gather;
    launch(body, blocks_for(args.count), stream);
  } else if (plan.pass.row_dtype == Dtype::kF32) {
    pack<4>(plan, stream);
  } else {
    pack<2>(plan, stream);
  }
}

}  // namespace hsdp::kernels
