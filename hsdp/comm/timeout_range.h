// The range of a world's timeout: what clocks can add, and what a person would call a limit.
#pragma once

#include <chrono>
#include <string_view>

namespace hsdp::comm {

constexpr std::chrono::milliseconds kShortestTimeout{1};
constexpr std::chrono::seconds kLongestTimeout{1'000'000};  // eleven days

// Throws UsageError, which begins with `what`, unless the timeout is within the range.
void require_timeout(std::chrono::duration<double> timeout, std::string_view what);

}  // namespace hsdp::comm
