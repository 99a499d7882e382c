// The plain replica hop with a wire dtype of its own, for users that name none themselves.
// Thread-safe; has no state, so several may share it.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "hsdp/replica_hop.h"

namespace hsdp::python {

class WireHop final : public ReplicaHop {
 public:
  // Without a dtype: whatever its user would send anyway.
  explicit WireHop(std::optional<Dtype> wire) : wire_(wire), plain_(plain_hop()) {}

  void reduce(Communicator& replicas, const ReplicaShard& shard, Stream& stream) override {
    ReplicaShard own = shard;
    own.wire = wire_.value_or(shard.wire);
    plain_->reduce(replicas, own, stream);
  }
  [[nodiscard]] std::string_view name() const override { return plain_->name(); }
  [[nodiscard]] std::optional<Dtype> wire() const { return wire_; }

 private:
  std::optional<Dtype> wire_;
  std::shared_ptr<ReplicaHop> plain_;
};

}  // namespace hsdp::python
