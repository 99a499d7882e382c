// What tests set of a Trace. Internal.
#pragma once

#include <cstddef>
#include <functional>

#include "hsdp/comm/operation_record.h"
#include "hsdp/trace.h"

namespace hsdp {

struct TraceSettings {
  // A test that sets the clock writes the record itself.
  std::function<double()> now_s = Operations::now_s;
  std::size_t part_bytes = std::size_t{1} << 20U;  // text that a rank sends at once
};

[[nodiscard]] Trace begin_trace(Reducer& reducer, const std::filesystem::path& path,
                                TraceSettings settings);

}  // namespace hsdp
