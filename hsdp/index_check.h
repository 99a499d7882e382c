// Checks indices that callers pass, such as those of parameters, buckets and units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "hsdp/error.h"

namespace hsdp {

// Throws UsageError unless 0 <= `index` < `count`. `what`: "a bucket below".
inline std::size_t check_index(std::string_view where, std::string_view what, std::int64_t index,
                               std::int64_t count) {
  if (index < 0 || index >= count) {
    throw UsageError({.where = std::string(where),
                      .expected = std::string(what) + " " + std::to_string(count),
                      .got = std::to_string(index)});
  }
  return static_cast<std::size_t>(index);
}

}  // namespace hsdp
