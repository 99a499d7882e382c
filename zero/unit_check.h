// For the option verify_every: before the update of every Nth step, checks that all ranks of the
// mesh have trained with the same values of each unit [Note: parameters that are compared].
//
// It digests each unit's last gather in the step's microbatches. Ranks may gather different units,
// in different orders and numbers. The lane's thread calls gathered(), never during
// before_update(); the thread that requests gathers calls the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/digest_comparison.h"
#include "hsdp/tensor_view.h"

namespace hsdp::zero {

class UnitCheck {
 public:
  struct Unit {
    std::string name{};
    std::vector<std::string> parameters{};
  };
  // `reducer` has the option and must outlive this object. `key` is the same on every rank of the
  // mesh, and nothing else uses it.
  UnitCheck(const Reducer& reducer, std::string key, std::vector<Unit> units);

  // Whether before_update() compares: once per step that is due.
  [[nodiscard]] bool is_due() const;
  // The step for which a gather requested now is compared. Nothing outside a microbatch, or if not
  // is_due().
  [[nodiscard]] std::optional<std::int64_t> step_of_gather() const;
  // Enqueues the digests of a unit's arrays. They replace those of an earlier gather.
  void gathered(std::size_t unit, std::int64_t step, std::span<const TensorView> arrays,
                const Stream& stream);
  // Call before an update. If is_due(), it is collective over the mesh, and the device must have
  // computed all digests. If ranks differ, ends the world on every rank with a MismatchError that
  // names the parameter, its unit and the ranks in the minority.
  void before_update();

 private:
  void require_equal(std::int64_t step);

  const Reducer& reducer_;
  const std::int64_t every_;
  Communicator world_;
  const std::string key_;
  const std::vector<Unit> units_;
  std::vector<std::size_t> begins_;  // each unit's first parameter in `digests_`; the end is last
  reducer::Digests digests_;         // one per parameter
  const reducer::Digests zero_;      // a single digest
  std::vector<std::int64_t> steps_;  // the step of each unit's digests; -1: none
  std::int64_t compared_step_ = -1;  // the last compared step
};

}  // namespace hsdp::zero
