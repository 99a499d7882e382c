// What every replica hop must keep to, whatever it does to the numbers. For tests of hops.
#pragma once

#include <functional>
#include <memory>

#include "hsdp/reducer_options.h"
#include "hsdp/replica_hop.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::test {

// Makes a new hop, with the same options every time.
using MakeHop = std::function<std::shared_ptr<ReplicaHop>()>;

// Runs steps through Reducers with that hop, with results sharded over these ranks, and checks: all
// replicas have the same bits, which depend neither on the bucket size nor on the run; steps that
// overflow, are dropped, or are cut short by the end of their world leave no trace; training
// resumes from a saved state with the same bits; a second owner is refused.
void check_hop_contract(const MakeHop& make_hop, MeshShape shape,
                        ShardOver shard_over = ShardOver::kShard);

}  // namespace hsdp::test
