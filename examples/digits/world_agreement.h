// What the ranks of a training tell each other at its end.
#pragma once

#include <string>
#include <vector>

#include "hsdp/comm/communicator.h"

namespace examples {

// Element by element, in float64. Collective.
[[nodiscard]] std::vector<double> sum_over_world(hsdp::Communicator& world,
                                                 std::vector<double> shares);

// Throws std::runtime_error on every rank when the ranks' texts differ. Collective.
void expect_same(hsdp::Communicator& world, const std::string& hash);

}  // namespace examples
