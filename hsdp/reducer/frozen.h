// What a Reducer has from its first microbatch on: buckets, memory, lanes. All ranks have it or
// none [Note: all ranks or none].
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/flag.h"
#include "hsdp/device/scratch.h"
#include "hsdp/memory_count.h"
#include "hsdp/reducer/bucket_pipeline.h"
#include "hsdp/reducer/collector.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/hop_owner.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/replica_check.h"

namespace hsdp::reducer {

// What it is made from. All of it outlives the Frozen.
struct FrozenSetting {
  const ParameterTable& parameters;
  const ReducerOptions& options;
  Groups& groups;
  Outcome& outcome;
  StepAgreement& agreement;
  MemoryCount memory;
};

class Frozen {
 public:
  // Collective over the world. What goes wrong on one rank is that rank's own error, and a
  // StepAbortedError naming it on the others; all give back what they had and may try again.
  explicit Frozen(const FrozenSetting& setting);
  ~Frozen();  // after its tasks, whatever went wrong
  Frozen(const Frozen&) = delete;
  Frozen& operator=(const Frozen&) = delete;

  [[nodiscard]] const BucketLayout& layout() const { return *layout_; }
  [[nodiscard]] GradientMemory& memory() { return *memory_; }
  [[nodiscard]] const GradientMemory& memory() const { return *memory_; }
  [[nodiscard]] BucketPipeline& pipeline() { return *pipeline_; }
  [[nodiscard]] Collector& collector() { return *collector_; }
  [[nodiscard]] std::shared_ptr<IssueOrder::Issuer> issuer() const { return collector_->issuer(); }
  // A zero flag for a step, of those that were taken with the rest: pinned memory may run out.
  [[nodiscard]] Flag step_flag();
  [[nodiscard]] bool sends_f16() const { return sends_f16_; }  // on either hop
  [[nodiscard]] std::int64_t replica_hop_bytes() const { return hop_ ? hop_->wire_bytes() : 0; }
  [[nodiscard]] std::int64_t misaligned_bytes() const {
    return collector_->misaligned_bytes() + pipeline_->misaligned_bytes();
  }
  // When all steps have ended; nothing is reduced any more.
  void let_go_of_hop() {
    if (hop_) hop_->let_go();
  }

 private:
  std::optional<BucketLayout> layout_;
  std::optional<GradientMemory> memory_;
  ScratchReserve scratch_;
  MemoryCount::Held scratch_held_;
  std::array<Flag, 4> flags_;    // a step's, and those of steps before it that are read yet
  std::optional<HopOwner> hop_;  // where there are several replicas
  std::optional<ReplicaCheck> check_;
  std::optional<BucketPipeline> pipeline_;
  std::optional<Collector> collector_;
  const Device device_;
  bool sends_f16_ = false;
  Outcome& outcome_;
};

}  // namespace hsdp::reducer
