// Runs a part of a set-up on all ranks: it succeeds on all or on none [Note: all ranks or none].
#pragma once

#include <functional>
#include <string_view>

#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

// Collective: runs `part`, then asks all ranks how it went. If it fails on one rank, that rank
// throws its own error and the others a StepAbortedError that names it. `what` completes "rank 1
// could not ..."; MismatchError if ranks give another one. `part` may be collective if its failures
// are AgreedErrors.
void together(Communicator& world, std::string_view what, const std::function<void()>& part);

}  // namespace hsdp::reducer
