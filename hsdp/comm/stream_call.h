// Runs a collective on a stream, so that a call that is complete on return also throws here.
#pragma once

#include <functional>

#include "hsdp/device/stream.h"

namespace hsdp::comm {

// stream.run(task). If the stream runs it on this thread before returning, and it throws, the error
// is rethrown here, whatever else the stream does with it.
void run_on_stream(Stream& stream, std::function<void()> task);

}  // namespace hsdp::comm
