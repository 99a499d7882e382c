// Checks, every `every` steps, that a RowReducer's totals have the same bits on all replicas [Note:
// results that are compared].
//
// The totals are the caller's, so their digests are taken as they are made, one of each parameter.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer/digest_comparison.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/step_agreement.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

class RowCheck {
 public:
  // Where one parameter lies in the row of a group.
  struct Run {
    int group = 0;
    ParameterRange range{};
    std::string name{};  // "'w' of layer 0"
  };

  // `every` 0: compares nothing.
  RowCheck(std::int64_t every, const Groups& groups) : every_(every), groups_(groups) {}

  [[nodiscard]] bool is_due(std::int64_t step) const {
    return every_ > 0 && (step + 1) % every_ == 0;
  }
  [[nodiscard]] bool has_begun(std::int64_t step) const { return step_ == step; }
  // Before the first total of a step that is due; the last such step has been settled.
  void begin(std::int64_t step, std::vector<Run> runs);
  // Enqueues the digests of a group's total, in a step that has begun.
  void add(int group, TensorView total, const Stream& stream);
  // After the device has done that: numbers of which the ranks exchange the largest. None if the
  // step has not begun.
  [[nodiscard]] std::vector<std::int64_t> claim(std::int64_t step) const;
  // `most`: the largest of all ranks' claims. If replicas differ, ends the world on every rank by a
  // MismatchError that names the parameter, its module and the ranks in the minority.
  void require_equal(std::int64_t step, std::span<const std::int64_t> most,
                     StepAgreement& agreement);

 private:
  std::int64_t every_;
  Groups groups_;
  std::int64_t step_ = -1;
  std::vector<Run> runs_;
  Digests digests_;  // of the runs
};

}  // namespace hsdp::reducer
