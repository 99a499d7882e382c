// A word that a device's work sets and the host reads.
//
// Zero when made. After waiting for an Event, the host sees what the work before that Event wrote.
// It lives as long as its last copy, which must outlive the work that writes it (InFlight).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "hsdp/tensor_view.h"

namespace hsdp {

using Flag = std::shared_ptr<std::atomic<std::uint32_t>>;

// Plain memory for the host; pinned memory from a pool for a GPU.
[[nodiscard]] Flag make_flag(Device device);

// Returns the flag's word and never reuses it: kernels that read it may stay queued for as long as
// a GPU hangs.
[[nodiscard]] std::atomic<std::uint32_t>& keep_for_good(Flag flag);

}  // namespace hsdp
