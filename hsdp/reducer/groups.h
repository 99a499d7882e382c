// The ranks that one Reducer works with: the mesh's world, and splits of its groups that are the
// Reducer's own. Cheap to copy.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/mesh.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

struct Groups {
  Device device;
  Communicator world;
  Communicator shard;
  Communicator replicate;

  [[nodiscard]] bool on_host() const { return device.type == DeviceType::kHost; }
};

// Collective over the mesh: all ranks have their groups in the end or none.
[[nodiscard]] Groups make_groups(const Mesh& mesh);

}  // namespace hsdp::reducer
