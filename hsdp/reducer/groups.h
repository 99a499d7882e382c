// The ranks that one Reducer works with: the mesh's world, and splits of its groups that are the
// Reducer's own [Note: groups of one]. Cheap to copy.
#pragma once

#include <memory>
#include <string>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/issue_order.h"
#include "hsdp/mesh.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

struct Groups {
  Device device;
  Communicator world;
  Communicator shard;
  Communicator replicate;

  // Which copy of the model this rank's shard group holds.
  [[nodiscard]] int replica() const { return world.rank() / shard.size(); }
  [[nodiscard]] bool on_host() const { return device.type == DeviceType::kHost; }
};

// Collective over the mesh: all ranks have their groups in the end or none.
[[nodiscard]] Groups make_groups(const Mesh& mesh);

// What was called on a group so far, as it is compared between its ranks; nothing where the engine
// compares each call.
[[nodiscard]] std::string calls_text(const Communicator& group);

// What lanes on a GPU are issued by; null on the host. Collective over the world, as
// IssueOrder::add_issuer() is.
[[nodiscard]] std::shared_ptr<IssueOrder::Issuer> add_issuer(Groups& groups);

}  // namespace hsdp::reducer
