// Checks before every `every`th update that all ranks of the mesh have gathered the same values of
// each unit since the last one, for the option verify_every [Note: parameters that are compared].
//
// It takes the digest of a unit's first gather. Ranks may gather other units, in another order and
// number. The lane's thread calls gathered(), when no other call runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer/digest_comparison.h"
#include "hsdp/tensor_view.h"

namespace hsdp::zero {

class UnitCheck {
 public:
  struct Unit {
    std::string name{};
    std::vector<std::string> parameters{};
  };
  // `key`: the same on every rank of `world`, the mesh, and used by nothing else.
  UnitCheck(std::int64_t every, Device device, Communicator world, std::string key,
            std::vector<Unit> units);

  // Whether the gathers before the next update are compared.
  [[nodiscard]] bool is_due() const { return (update_count_ + 1) % every_ == 0; }
  // Enqueues the digests of a unit's arrays, if they are to be compared and it has none yet.
  void gathered(std::size_t unit, std::span<const TensorView> arrays, const Stream& stream);
  // Before an update. Where it is_due(): collective over the mesh, after the device has taken all
  // digests. If ranks differ, ends the world on every rank by a MismatchError that names the
  // parameter, its unit and the ranks in the minority.
  void before_update();

 private:
  void require_equal();

  const std::int64_t every_;
  Communicator world_;
  const std::string key_;
  const std::vector<Unit> units_;
  std::vector<std::size_t> begins_;  // of the units' parameters in `digests_`, and its size
  reducer::Digests digests_;         // of the parameters
  std::vector<bool> is_taken_;       // by unit
  std::int64_t update_count_ = 0;
};

}  // namespace hsdp::zero
