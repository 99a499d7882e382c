// The ranks that one Reducer works with: the mesh's world, and its own splits of the mesh's groups
// [Note: groups of one]. Cheap to copy.
#pragma once

#include <memory>
#include <string>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/issue_order.h"
#include "hsdp/comm/operation_record.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer/flight_watch.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

// Which slices of a BucketLayout a rank has.
struct SliceOwner {
  int shard_rank = 0;
  int part = 0;
  int parts = 1;

  [[nodiscard]] int slice_rank() const { return shard_rank * parts + part; }
};

struct Groups {
  Device device;
  Communicator world;
  Communicator shard;
  Communicator replicate;
  // Number of parts of a shard rank's slices: the number of replicas if results are sharded over
  // the mesh, else 1. BucketLayout has a row for each part; those of a shard rank are adjacent
  // [Note: results over the mesh].
  int parts = 1;
  Operations operations{};                     // under the name given to make_groups()
  std::shared_ptr<const FlightWatch> watch{};  // writes them down when the world ends

  [[nodiscard]] int slice_count() const { return shard.size() * parts; }
  [[nodiscard]] SliceOwner owner() const {
    return {shard.rank(), parts > 1 ? replicate.rank() : 0, parts};
  }
  // Which copy of the model this rank's shard group holds.
  [[nodiscard]] int replica() const { return world.rank() / shard.size(); }
  [[nodiscard]] bool on_host() const { return device.type == DeviceType::kHost; }
};

// Collective over the mesh: succeeds on all ranks or on none. `name` goes into the record of
// operations.
[[nodiscard]] Groups make_groups(const Mesh& mesh, const std::string& name);

// The calls on a group so far, as text that its ranks compare; empty if the engine compares each
// call.
[[nodiscard]] std::string calls_text(const Communicator& group);

// Adds an Issuer for lanes on a GPU; null on the host. Collective over the world.
[[nodiscard]] std::shared_ptr<IssueOrder::Issuer> add_issuer(Groups& groups);

}  // namespace hsdp::reducer
