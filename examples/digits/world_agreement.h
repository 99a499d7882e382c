// What a training's ranks exchange at its end.
#pragma once

#include <string>
#include <vector>

#include "hsdp/comm/communicator.h"

namespace examples {

// Sums element by element, in float64. Collective.
[[nodiscard]] std::vector<double> sum_over_world(hsdp::Communicator& world,
                                                 std::vector<double> shares);

// Throws std::runtime_error on every rank if the ranks' texts differ. Collective.
void expect_same(hsdp::Communicator& world, const std::string& hash);

}  // namespace examples
