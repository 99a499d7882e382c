// Checks that every replica holds the same bits as the first one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "hsdp/snapshot/parameter_reader.h"

namespace hsdp {

struct UnequalElement {
  int copy = 0;
  std::int64_t index = 0;  // in the flattened parameter
};

class CopyChecker {
 public:
  explicit CopyChecker(const Snapshot& snapshot) : reader_(snapshot) {}

  // Compares the first copy's elements from `begin` on with all other copies, which also verifies
  // their checksums. Does nothing for partials, which may differ.
  [[nodiscard]] std::optional<UnequalElement> check(std::size_t parameter, std::int64_t begin,
                                                    StoredElements first);

 private:
  ParameterReader reader_;
};

}  // namespace hsdp
