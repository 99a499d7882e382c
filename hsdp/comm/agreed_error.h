// A failure of one member that every member of a group throws in the same call: the group stays
// usable.
#pragma once

#include <string>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::comm {

class AgreedError : public Error {
 public:
  // `rank` of the world failed; `reason` does not name it.
  AgreedError(std::string reason, int rank, int world_size)
      : Error(reason + " (rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
              ")"),
        reason_(std::move(reason)),
        rank_(rank) {}
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  std::string reason_;
  int rank_;
};

}  // namespace hsdp::comm
