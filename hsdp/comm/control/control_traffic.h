// Counts the messages and bytes on each link of a rank's control connection. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "hsdp/comm/control_link_stats.h"

namespace hsdp::comm {

class ControlTraffic {
 public:
  void add_sent(int peer, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    ControlLinkStats& link = links_[peer];
    ++link.sent_count;
    link.sent_bytes += static_cast<std::int64_t>(bytes);
  }
  void add_received(int peer, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    ControlLinkStats& link = links_[peer];
    ++link.received_count;
    link.received_bytes += static_cast<std::int64_t>(bytes);
  }
  // In ascending order of the peers.
  [[nodiscard]] std::vector<ControlLinkStats> links() const {
    const std::lock_guard lock(mutex_);
    std::vector<ControlLinkStats> all;
    for (const auto& [peer, link] : links_) {
      all.push_back(link);
      all.back().peer = peer;
    }
    return all;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, ControlLinkStats> links_;
};

}  // namespace hsdp::comm
