// A word that the work of a device sets and the host reads.
//
// Zero when it is made. The host sees what was written by the work before an Event once it has
// waited for that Event. It lives until its last copy dies, and that must not be before the work
// that writes it is done (InFlight).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "hsdp/tensor_view.h"

namespace hsdp {

using Flag = std::shared_ptr<std::atomic<std::uint32_t>>;

// Plain memory for the host; pinned memory, from a pool, for a GPU.
[[nodiscard]] Flag make_flag(Device device);

// Its word, which is never used for anything else: kernels that read it may be queued for as long
// as a GPU hangs.
[[nodiscard]] std::atomic<std::uint32_t>& keep_for_good(Flag flag);

}  // namespace hsdp
