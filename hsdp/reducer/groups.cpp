#include "hsdp/reducer/groups.h"

#include "hsdp/reducer/together.h"

namespace hsdp::reducer {

Groups make_groups(const Mesh& mesh) {
  Groups groups;
  groups.device = mesh.device();
  groups.world = mesh.world();
  together(groups.world, "make its shard group",
           [&] { groups.shard = mesh.shard_group().split(0, mesh.shard_rank()); });
  together(groups.world, "make its replicate group",
           [&] { groups.replicate = mesh.replicate_group().split(0, mesh.replica()); });
  return groups;
}

}  // namespace hsdp::reducer
