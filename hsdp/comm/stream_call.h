// Runs a collective on a stream so that a call which is over when it returns also throws here.
#pragma once

#include <functional>

#include "hsdp/device/stream.h"

namespace hsdp::comm {

// stream.run(task). When the stream runs it before returning, on this thread, and it throws, the
// error leaves through here, whatever else the stream does with it.
void run_on_stream(Stream& stream, std::function<void()> task);

}  // namespace hsdp::comm
