// Uses the installed library: connects a world, reduces, and opens a missing snapshot.
#include <cstdio>

#include "hsdp/comm/world.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/snapshot.h"

namespace {

bool sums() {
  float value = 3.0F;
  std::vector<hsdp::Communicator> world = hsdp::in_process_world(1);
  world[0].all_reduce(hsdp::TensorView{&value, 1, hsdp::Dtype::kF32});
  return value == 3.0F;
}

bool refuses_what_is_no_snapshot() {
  try {
    static_cast<void>(hsdp::Snapshot::open("no_such_snapshot.h5"));
  } catch (const hsdp::SnapshotError&) {
    return true;
  }
  return false;
}

}  // namespace

int main() {
  const double factor = hsdp::gradient_divide_factor(8, 4, true);
  std::printf("1/%g\n", factor);
  return factor == 32.0 && sums() && refuses_what_is_no_snapshot() ? 0 : 1;
}
