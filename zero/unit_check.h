// Checks in every Nth step, for the option verify_every, that all ranks of the mesh have trained
// with the same values of each unit, before that step's update [Note: parameters that are
// compared].
//
// It takes the digest of a unit's last gather in the step's microbatches. Ranks may gather other
// units, in another order and number. The lane's thread calls gathered(), when before_update() does
// not run; the thread that asks for gathers calls the rest.
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
  // The Reducer, which has the option, outlives it. `key`: the same on every rank of the mesh, and
  // used by nothing else.
  UnitCheck(const Reducer& reducer, std::string key, std::vector<Unit> units);

  // Whether before_update() compares: the first time after the last step, if that is to be.
  [[nodiscard]] bool is_due() const;
  // The step for which a gather is compared that is asked for now: within a microbatch, if
  // is_due().
  [[nodiscard]] std::optional<std::int64_t> step_of_gather() const;
  // Enqueues the digests of a unit's arrays, which replace those of an earlier gather.
  void gathered(std::size_t unit, std::int64_t step, std::span<const TensorView> arrays,
                const Stream& stream);
  // Before an update. Where it is_due(): collective over the mesh, after the device has taken all
  // digests. If ranks differ, ends the world on every rank by a MismatchError that names the
  // parameter, its unit and the ranks in the minority.
  void before_update();

 private:
  void require_equal(std::int64_t step);

  const Reducer& reducer_;
  const std::int64_t every_;
  Communicator world_;
  const std::string key_;
  const std::vector<Unit> units_;
  std::vector<std::size_t> begins_;  // of the units' parameters in `digests_`, and its size
  reducer::Digests digests_;         // of the parameters
  const reducer::Digests zero_;      // one
  std::vector<std::int64_t> steps_;  // of each unit's digests; -1: it has none
  std::int64_t compared_step_ = -1;  // the last one
};

}  // namespace hsdp::zero
