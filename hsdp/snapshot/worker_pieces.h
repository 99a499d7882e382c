// Runs numbered pieces of work on several threads and takes their results in order, so that the
// outcome does not depend on timing.
#pragma once

#include <cstddef>
#include <functional>

namespace hsdp {

// A worker computes piece `piece` and returns a function that takes over its result. Those
// functions are called one at a time, in ascending order.
using PieceTaker = std::function<void()>;
using PieceWorker = std::function<PieceTaker(std::size_t piece)>;

// Calls `make_worker` once on each thread. 0 threads: as many as the machine has, up to 8. The
// first exception stops the remaining work and is rethrown.
void run_pieces(std::size_t piece_count, int thread_count,
                const std::function<PieceWorker()>& make_worker);

}  // namespace hsdp
