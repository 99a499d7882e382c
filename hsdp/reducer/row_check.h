// Checks, every `every` steps, that a RowReducer's totals have the same bits on all replicas [Note:
// results that are compared].
//
// The caller owns the totals, so each is digested when it is made, with one digest per parameter.
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

  // With `every` 0 it compares nothing.
  RowCheck(std::int64_t every, const Groups& groups) : every_(every), groups_(groups) {}

  [[nodiscard]] bool is_due(std::int64_t step) const {
    return every_ > 0 && (step + 1) % every_ == 0;
  }
  [[nodiscard]] bool has_begun(std::int64_t step) const { return step_ == step; }
  // Call before the first total of a step that is due, once the previous such step is settled.
  void begin(std::int64_t step, std::vector<Run> runs);
  // Enqueues the digests of a group's total. Only after begin().
  void add(int group, TensorView total, const Stream& stream);
  // Returns the numbers of which the ranks exchange the maximum; none if begin() was not called for
  // `step`. Call after the device has computed the digests.
  [[nodiscard]] std::vector<std::int64_t> claim(std::int64_t step) const;
  // If replicas differ, ends the world on every rank with a MismatchError that names the parameter,
  // its module and the ranks in the minority. `most`: the maximum of all ranks' claims.
  void require_equal(std::int64_t step, std::span<const std::int64_t> most,
                     StepAgreement& agreement);

 private:
  std::int64_t every_;
  Groups groups_;
  std::int64_t step_ = -1;
  std::vector<Run> runs_;
  Digests digests_;  // one per run
};

}  // namespace hsdp::reducer
