#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_pack.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/device_tiles.h"

namespace hsdp::kernels {
namespace {

template <int kElementBytes>
void pack(const PackPlan& plan, const Stream& stream) {
  if (plan.tiled) {
    launch(TileBody<kElementBytes>{plan.pass, plan.gradient, plan.tiles}, plan.tiles.tile_count,
           stream);
  } else {
    launch(GatherBody<kElementBytes>{plan.pass, plan.gradient, plan.gather},
           blocks_for(groups_over(plan.pass)), stream);
  }
}

}  // namespace

void pack_on_device(const CastAndPack& args, const Stream& stream) {
  if (args.count == 0) return;
  const PackPlan plan = plan_pack(args);
  if (plan.pass.row_dtype == Dtype::kF32) {
    pack<4>(plan, stream);
  } else {
    pack<2>(plan, stream);
  }
}

}  // namespace hsdp::kernels
