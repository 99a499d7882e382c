#include "hsdp/comm/host/piped_copy.h"

#include <algorithm>

namespace hsdp::comm {

void PipedCopy::send(int peer, const void* data, std::size_t size) {
  Lane& lane = lanes_[static_cast<std::size_t>(peer)];
  lane.out = static_cast<const std::byte*>(data);
  lane.out_left = size;
}

void PipedCopy::receive(int peer, void* data, std::size_t size) {
  Lane& lane = lanes_[static_cast<std::size_t>(peer)];
  lane.in = static_cast<std::byte*>(data);
  lane.in_left = size;
}

bool PipedCopy::step() {
  bool moved = false;
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int peer = (group_.rank() + distance) % group_.size();
    Lane& lane = lanes_[static_cast<std::size_t>(peer)];
    const std::size_t out = std::min(lane.out_left, group_.message_bytes());
    if (out > 0 && group_.channel(peer).send(lane.out, out)) {
      lane.out += out;
      lane.out_left -= out;
      moved = true;
    }
    const std::size_t in = std::min(lane.in_left, group_.message_bytes());
    if (in > 0 && group_.channel(peer).receive(lane.in, in)) {
      lane.in += in;
      lane.in_left -= in;
      moved = true;
    }
    if (lane.out_left + lane.in_left > 0) waits_for_ = peer;
  }
  return moved;
}

bool PipedCopy::complete() {
  return std::ranges::all_of(lanes_,
                             [](const Lane& lane) { return lane.out_left + lane.in_left == 0; });
}

void PipedCopy::run() {
  while (!complete()) {
    group_.wait([this] { return step(); }, [this] { return waits_for_; });
  }
}

}  // namespace hsdp::comm
