// Owns the use of a replica hop: prepares it and binds it to separate groups, until let_go() or the
// destructor unbinds it. Then another owner may use the hop.
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

  // Collective over the world: succeeds on all ranks or on none. UsageError if the hop has another
  // owner.
  HopOwner(Groups& groups, std::shared_ptr<ReplicaHop> hop, const MakePlan& make_plan);
  HopOwner(const HopOwner&) = delete;
  HopOwner& operator=(const HopOwner&) = delete;

  // Local, between steps: prepares the hop for other buckets.
  void prepare(HopPlan plan);
  void let_go() { taken_.reset(); }

  // Bytes that the hop's groups were given to send, in the wire dtype. An all-reduce counts twice.
  [[nodiscard]] std::int64_t wire_bytes() const;
  // The calls on its groups, as text that replicas compare; see Communicator.
  [[nodiscard]] std::string calls() const;
  void compare_calls(const std::string& key);
  // Memory that those groups have reserved.
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
