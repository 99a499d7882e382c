// A failure of one member that all members of a group throw in the same call. The group stays
// usable.
#pragma once

#include <span>
#include <string>
#include <utility>

#include "hsdp/comm/control.h"
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

// Throws if a member of a group could not do its part: with this rank's own reason, or else the
// first one. `reasons` are in the order of `members`, world ranks; empty means success.
inline void throw_agreed(std::span<const std::string> reasons, std::span<const int> members,
                         const Control& control) {
  int failed = -1;
  for (std::size_t r = 0; r < reasons.size(); ++r) {
    if (reasons[r].empty()) continue;
    if (failed < 0 || members[r] == control.rank()) failed = static_cast<int>(r);
  }
  if (failed < 0) return;
  const auto r = static_cast<std::size_t>(failed);
  throw AgreedError(reasons[r], members[r], control.size());
}

}  // namespace hsdp::comm
