// The settings of a Trace that only tests change. Internal.
#pragma once

#include <cstddef>
#include <functional>

#include "hsdp/comm/operation_record.h"
#include "hsdp/trace.h"

namespace hsdp {

struct TraceSettings {
  // A test that replaces the clock also writes the operation record itself.
  std::function<double()> now_s = Operations::now_s;
  std::size_t part_bytes = std::size_t{1} << 20U;  // text per message of a rank
};

[[nodiscard]] Trace begin_trace(Reducer& reducer, const std::filesystem::path& path,
                                TraceSettings settings);

}  // namespace hsdp
