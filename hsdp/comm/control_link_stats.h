// Traffic on one link of a rank's control connection. Plain data.
#pragma once

#include <cstdint>

namespace hsdp {

// Messages and their bytes, headers included, since the world began. Beats are not counted, since
// their number depends on time.
struct ControlLinkStats {
  int peer = 0;  // world rank
  std::int64_t sent_count = 0;
  std::int64_t sent_bytes = 0;
  std::int64_t received_count = 0;
  std::int64_t received_bytes = 0;
};

}  // namespace hsdp
