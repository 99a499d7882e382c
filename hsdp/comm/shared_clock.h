// This rank's steady clock beside that of the first rank of a group, so that times of several ranks
// can be compared.
#pragma once

#include <functional>
#include <string>

#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

// The first rank's clock shows offset_s more than this rank's, with an error of at most error_s.
struct ClockOffset {
  double offset_s = 0;
  double error_s = 0;
};

constexpr double kMostDrift = 1e-4;  // between two clocks, as a part of the time

// Collective; use a key once. Some exchanges over the control connection: none of them can be known
// on one rank before another has said its part, which bounds the offset from both sides.
// [Note: clocks brought together]
[[nodiscard]] ClockOffset measure_clock(Communicator& group, const std::string& key,
                                        const std::function<double()>& now_s);

}  // namespace hsdp::comm
