// Who uses a replica hop: it has the hop, prepared and bound to groups of its own, until it lets go
// of it or its life ends. Then the hop is bound to no groups, and free for another one.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "hsdp/reducer/groups.h"
#include "hsdp/replica_hop.h"

namespace hsdp::reducer {

class HopOwner {
 public:
  using MakePlan = std::function<HopPlan()>;

  // Collective over the world: all ranks have their hop or none. A hop that somebody else has is a
  // UsageError.
  HopOwner(Groups& groups, std::shared_ptr<ReplicaHop> hop, const MakePlan& make_plan);
  HopOwner(const HopOwner&) = delete;
  HopOwner& operator=(const HopOwner&) = delete;

  // Local, between steps: other buckets.
  void prepare(HopPlan plan);
  void let_go() { taken_.reset(); }

  // What the hop's groups were given to send: messages in the dtype that travels, an all-reduce's
  // twice.
  [[nodiscard]] std::int64_t wire_bytes() const;
  // What was called on its groups, to be compared between replicas; see Communicator.
  [[nodiscard]] std::string calls() const;
  void compare_calls(const std::string& key);
  // What those groups reserved.
  [[nodiscard]] std::int64_t reserved_bytes() const;

 private:
  struct Release {
    void operator()(ReplicaHop* hop) const;
  };

  std::shared_ptr<ReplicaHop> hop_;
  HopPlan plan_;
  Communicator scatter_;
  Communicator gather_;
  bool has_gather_group_ = false;
  std::unique_ptr<ReplicaHop, Release> taken_;
};

}  // namespace hsdp::reducer
