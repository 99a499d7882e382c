// One act of all ranks, which all have done in the end or none [Note: all ranks or none].
#pragma once

#include <functional>
#include <string_view>

#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

// Runs `part` and asks the ranks of `world` how it went. Collective. What goes wrong on one rank is
// that rank's own error, and a StepAbortedError naming it on the others. `what` completes "rank 1
// could not ..."; ranks with another `what` are a MismatchError. `part` may itself be collective
// where its failures are AgreedErrors.
void together(Communicator& world, std::string_view what, const std::function<void()>& part);

}  // namespace hsdp::reducer
