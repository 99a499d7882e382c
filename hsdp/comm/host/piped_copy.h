// Exchanges bytes with every peer at once, through a group's channels.
#pragma once

#include <cstddef>
#include <vector>

#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

class PipedCopy {
 public:
  explicit PipedCopy(HostGroup& group)
      : group_(group), transfers_(static_cast<std::size_t>(group.size())) {}

  // Plans what to send to a peer and what to receive; the peer plans the mirror image.
  void send(int peer, const void* data, std::size_t size);
  void receive(int peer, void* data, std::size_t size);
  // Returns when everything has been sent and received.
  void run();

 private:
  struct Transfer {
    const std::byte* out = nullptr;
    std::size_t out_left = 0;
    std::byte* in = nullptr;
    std::size_t in_left = 0;
  };

  bool step();
  [[nodiscard]] bool complete();

  HostGroup& group_;
  std::vector<Transfer> transfers_;
  int waits_for_ = 0;
};

}  // namespace hsdp::comm
