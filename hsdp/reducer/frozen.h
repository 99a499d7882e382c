// What a Reducer makes before its first microbatch: buckets, memory, lanes [Note: all ranks or
// none].
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
  // Collective over the world. If it fails on one rank, that rank throws its own error and the
  // others a StepAbortedError that names it. All release what they had and may try again.
  explicit Frozen(const FrozenSetting& setting);
  ~Frozen();  // waits for its tasks, even after errors
  Frozen(const Frozen&) = delete;
  Frozen& operator=(const Frozen&) = delete;

  [[nodiscard]] const BucketLayout& layout() const { return *layout_; }
  [[nodiscard]] GradientMemory& memory() { return *memory_; }
  [[nodiscard]] const GradientMemory& memory() const { return *memory_; }
  [[nodiscard]] BucketPipeline& pipeline() { return *pipeline_; }
  [[nodiscard]] Collector& collector() { return *collector_; }
  [[nodiscard]] std::shared_ptr<IssueOrder::Issuer> issuer() const { return collector_->issuer(); }
  // A flag for a step, set to zero. All are allocated at the start, as pinned memory may run out.
  [[nodiscard]] Flag step_flag();
  [[nodiscard]] bool sends_f16() const { return sends_f16_; }  // on either hop
  [[nodiscard]] std::int64_t replica_hop_bytes() const { return hop_ ? hop_->wire_bytes() : 0; }
  [[nodiscard]] std::int64_t misaligned_bytes() const {
    return collector_->misaligned_bytes() + pipeline_->misaligned_bytes();
  }
  // Frees the hop for another Reducer. Called when all steps have ended and no more will begin.
  void let_go_of_hop() {
    if (hop_) hop_->let_go();
  }

 private:
  std::optional<BucketLayout> layout_;
  std::optional<GradientMemory> memory_;
  ScratchReserve scratch_;
  MemoryCount::Held scratch_held_;
  std::array<Flag, 4> flags_;    // of the step, and of earlier steps that may still be read
  std::optional<HopOwner> hop_;  // if there are several replicas
  std::optional<ReplicaCheck> check_;
  std::optional<BucketPipeline> pipeline_;
  std::optional<Collector> collector_;
  const Device device_;
  bool sends_f16_ = false;
  Outcome& outcome_;
};

}  // namespace hsdp::reducer
