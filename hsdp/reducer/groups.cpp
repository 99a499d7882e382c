#include "hsdp/reducer/groups.h"

#include "hsdp/comm/engine.h"
#include "hsdp/reducer/together.h"

namespace hsdp::reducer {

Groups make_groups(const Mesh& mesh, const std::string& name) {
  Groups groups;
  groups.device = mesh.device();
  groups.world = mesh.world();
  together(groups.world, "make its shard group",
           [&] { groups.shard = mesh.shard_group().split(0, mesh.shard_rank()); });
  together(groups.world, "make its replicate group",
           [&] { groups.replicate = mesh.replicate_group().split(0, mesh.replica()); });
  groups.operations = Operations(groups.world.engine()->control().operations(),
                                 {.name = name,
                                  .replicate = mesh.replicate_size(),
                                  .shard = mesh.shard_size(),
                                  .ranks = groups.world.world_ranks(),
                                  .key = groups.world.next_exchange_key()});
  groups.watch = watch_flight(mesh);
  return groups;
}

std::string calls_text(const Communicator& group) {
  const std::uint64_t hash = group.call_hash();
  return hash == 0 ? std::string() : std::to_string(hash) + " ";
}

std::shared_ptr<IssueOrder::Issuer> add_issuer(Groups& groups) {
  if (groups.on_host()) return nullptr;
  std::shared_ptr<IssueOrder> order;
  together(groups.world, "start its issuing thread", [&] { order = IssueOrder::of(groups.world); });
  return order->add_issuer();
}

}  // namespace hsdp::reducer
