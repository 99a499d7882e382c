// A part of a Reducer's set-up that one rank cannot do, and what every rank sees of the failure.
#pragma once

#include <string>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "tests/support/failing_calls.h"

namespace hsdp::test {

struct SetUpFault {
  std::string part;  // as the other ranks' error names it
  FailingCall call;
  int skipped;  // earlier calls of that kind in the set-up
};

// Every part of the set-up of a Reducer with a MemoryHop that needs memory or threads.
[[nodiscard]] const std::vector<SetUpFault>& set_up_faults();

// The plain hop, with memory that it may fail to get.
class MemoryHop final : public ReplicaHop {
 public:
  void prepare(const HopPlan& plan) override {
    memory_ = Buffer(plan.device, 100);
    plain_.prepare(plan);
  }
  void bind(Communicator scatter, Communicator gather) override {
    plain_.bind(std::move(scatter), std::move(gather));
  }
  [[nodiscard]] bool needs_gather_group() const override { return false; }
  Event reduce(const HopBucket& bucket, Stream& stream) override {
    return plain_.reduce(bucket, stream);
  }
  [[nodiscard]] std::string describe() const override { return "plain with memory"; }

 private:
  Buffer memory_;
  PlainHop plain_;
};

// Collective over the mesh. Rank `bad` cannot do its part. The other ranks are told at once, and
// every rank may still ask the Reducer, which has a parameter "w0", anything.
void expect_failed_set_up(Reducer& reducer, const Mesh& mesh, const SetUpFault& fault, int bad);

}  // namespace hsdp::test
