#include <cstdio>
#include <vector>

#include "hsdp/reducer.h"

int main() {
  const hsdp::Mesh mesh = hsdp::init_mesh({.replicate = 2, .shard = 2});
  hsdp::Reducer reducer(mesh, {.reduce_dtype = hsdp::Dtype::kBf16});
  reducer.register_parameter({.name = "weight", .shape = {128, 64}});

  const std::vector<float> gradient(8192, static_cast<float>(mesh.rank()));  // 128 * 64
  for (int microbatch = 0; microbatch < 4; ++microbatch) {
    reducer.begin_microbatch({.last = microbatch == 3});
    reducer.gradient_ready("weight", {.data = gradient.data(), .shape = {128, 64}});
    reducer.end_microbatch();
  }
  const hsdp::TensorView mean = reducer.shard("weight");  // this rank's half, fp32
  std::printf("rank %d: %g\n", mesh.rank(), static_cast<const float*>(mean.data)[0]);
}
