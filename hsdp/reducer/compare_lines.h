// Compares descriptions between ranks line by line: registered parameters, the modules of a model,
// options.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

// A digest of the lines, the same in every build.
[[nodiscard]] std::uint64_t digest_of(const std::vector<std::string>& lines);

struct LineDifference {
  std::size_t line = 0;
  std::string expected;   // on rank 0; "nothing more" after its last line
  std::string got;        // on `rank`
  int rank = 0;           // in the world: the first one without lines, else the first unlike rank 0
  bool is_empty = false;  // `rank` has no lines at all, but another rank has
};

// Collective. The same answer on every rank; none if all agree. Digests travel first, then only the
// first line that differs. `what` names the comparison, as in "compare its options"; MismatchError
// if another rank is about to do something else.
[[nodiscard]] std::optional<LineDifference> compare_lines(Communicator& world,
                                                          const std::vector<std::string>& lines,
                                                          std::string_view what);

}  // namespace hsdp::reducer
