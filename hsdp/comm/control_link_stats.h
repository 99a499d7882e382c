// What went over one link of a rank's control connection. Plain data.
#pragma once

#include <cstdint>

namespace hsdp {

// Messages and their bytes, headers included, since the world began. Beats are left out: how many
// there are depends on the time.
struct ControlLinkStats {
  int peer = 0;  // world rank
  std::int64_t sent_count = 0;
  std::int64_t sent_bytes = 0;
  std::int64_t received_count = 0;
  std::int64_t received_bytes = 0;
};

}  // namespace hsdp
