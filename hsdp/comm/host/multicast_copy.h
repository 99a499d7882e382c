// Sends one buffer of this rank to all others and receives theirs, through the group's multicast.
#pragma once

#include <cstddef>
#include <vector>

#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

class MulticastCopy {
 public:
  explicit MulticastCopy(HostGroup& group)
      : group_(group), incoming_(static_cast<std::size_t>(group.size())) {}

  void send(const void* data, std::size_t size);
  // What `rank` sends.
  void receive(int rank, void* data, std::size_t size);
  // Returns when peers can read everything from here and everything of theirs has arrived.
  void run();

 private:
  struct Incoming {
    std::byte* data = nullptr;
    std::size_t left = 0;
  };

  bool step();
  [[nodiscard]] bool complete() const;

  HostGroup& group_;
  const std::byte* out_ = nullptr;
  std::size_t out_left_ = 0;
  std::vector<Incoming> incoming_;
  int waits_for_ = 0;
};

}  // namespace hsdp::comm
