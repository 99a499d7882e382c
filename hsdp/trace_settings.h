// What a Trace takes for granted, and its tests set.
#pragma once

#include <cstddef>
#include <functional>

#include "hsdp/comm/operation_record.h"
#include "hsdp/trace.h"

namespace hsdp {

struct TraceSettings {
  std::function<double()> now_s = Operations::now_s;  // the clock of the record's times
  std::size_t part_bytes = std::size_t{1} << 20U;     // a rank keeps no more as text
};

[[nodiscard]] Trace begin_trace(Reducer& reducer, const std::filesystem::path& path,
                                TraceSettings settings);

}  // namespace hsdp
