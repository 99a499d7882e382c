// Whether all ranks describe the same thing, a line for each of its parts: registered parameters,
// the modules of a model, options.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

// Tells different lines apart, and is the same in every build.
[[nodiscard]] std::uint64_t digest_of(const std::vector<std::string>& lines);

struct LineDifference {
  std::size_t line = 0;
  std::string expected;   // on rank 0; "nothing more" where there it has ended
  std::string got;        // on `rank`, the first that differs from rank 0
  int rank = 0;           // in the world
  bool is_empty = false;  // that rank has no lines at all; the others have
};

// Collective; the same answer on every rank, nothing when all agree. Digests travel first; of the
// lines only the first that differs does. `what` says what they are, as "compare its options":
// MismatchError where other ranks are about to do something else.
[[nodiscard]] std::optional<LineDifference> compare_lines(Communicator& world,
                                                          const std::vector<std::string>& lines,
                                                          std::string_view what);

}  // namespace hsdp::reducer
