// The ranks that one Reducer works with: the mesh's world, and splits of its groups that are the
// Reducer's own [Note: groups of one]. Cheap to copy.
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

// Whose slices of a BucketLayout a rank has.
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
  // Into how many parts a shard rank's slices are cut, one for each replica: where results are
  // sharded over the mesh, else 1. BucketLayout then has a row for each part, those of a shard rank
  // beside each other [Note: results over the mesh].
  int parts = 1;
  Operations operations{};                     // under the name of who made the groups
  std::shared_ptr<const FlightWatch> watch{};  // writes them down when the world ends

  [[nodiscard]] int slice_count() const { return shard.size() * parts; }
  [[nodiscard]] SliceOwner owner() const {
    return {shard.rank(), parts > 1 ? replicate.rank() : 0, parts};
  }
  // Which copy of the model this rank's shard group holds.
  [[nodiscard]] int replica() const { return world.rank() / shard.size(); }
  [[nodiscard]] bool on_host() const { return device.type == DeviceType::kHost; }
};

// Collective over the mesh: all ranks have their groups in the end or none. `name`: for whom, in
// the record of operations.
[[nodiscard]] Groups make_groups(const Mesh& mesh, const std::string& name);

// What was called on a group so far, as it is compared between its ranks; nothing where the engine
// compares each call.
[[nodiscard]] std::string calls_text(const Communicator& group);

// What lanes on a GPU are issued by; null on the host. Collective over the world, as
// IssueOrder::add_issuer() is.
[[nodiscard]] std::shared_ptr<IssueOrder::Issuer> add_issuer(Groups& groups);

}  // namespace hsdp::reducer
