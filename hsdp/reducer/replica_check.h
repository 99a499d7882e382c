// Checks, every `every` steps, that the result has the same bits on all replicas [Note: results
// that are compared].
//
// The digest of a rank's rows travels with the step's non-finite bit. Only if one differs do its
// replicas compare their rows run by run. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer/digest_comparison.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/step_agreement.h"

namespace hsdp::reducer {

class ReplicaCheck {
 public:
  // All that it refers to outlives it. `every` 0: compares nothing.
  ReplicaCheck(std::int64_t every, const ParameterTable& parameters, const BucketLayout& layout,
               const GradientMemory& memory, const Groups& groups);

  // True for every `every`th step, if there are several replicas.
  [[nodiscard]] bool is_due(std::int64_t step) const {
    return digest_.count() > 0 && (step + 1) % every_ == 0;
  }
  // Enqueues the digest of the result behind the work of `stream` so far.
  void take(const Stream& stream);
  // After the device has done that: numbers of which the ranks exchange the largest.
  [[nodiscard]] std::vector<std::int64_t> claim() const;
  // `most`: the largest of all ranks' claims. If replicas differ, ends the world on every rank by a
  // MismatchError that names the parameter, its bucket and the ranks in the minority.
  void require_equal(std::int64_t step, std::span<const std::int64_t> most,
                     StepAgreement& agreement);

 private:
  // A run of one parameter in this rank's row of a bucket.
  struct Run {
    int bucket = 0;
    ParameterRange range;
  };
  [[nodiscard]] std::vector<Run> runs() const;
  // The digests of the runs. Waits for the device.
  [[nodiscard]] std::vector<std::optional<std::string>> digests(std::span<const Run> runs) const;

  std::int64_t every_;
  const ParameterTable& parameters_;
  const BucketLayout& layout_;
  const GradientMemory& memory_;
  Groups groups_;
  Digests digest_;  // empty: nothing is compared
};

}  // namespace hsdp::reducer
