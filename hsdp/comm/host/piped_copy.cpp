#include "hsdp/comm/host/piped_copy.h"

#include <algorithm>

namespace hsdp::comm {

void PipedCopy::send(int peer, const void* data, std::size_t size) {
  Transfer& transfer = transfers_[static_cast<std::size_t>(peer)];
  transfer.out = static_cast<const std::byte*>(data);
  transfer.out_left = size;
}

void PipedCopy::receive(int peer, void* data, std::size_t size) {
  Transfer& transfer = transfers_[static_cast<std::size_t>(peer)];
  transfer.in = static_cast<std::byte*>(data);
  transfer.in_left = size;
}

bool PipedCopy::step() {
  bool moved = false;
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int peer = (group_.rank() + distance) % group_.size();
    Transfer& transfer = transfers_[static_cast<std::size_t>(peer)];
    const std::size_t out = std::min(transfer.out_left, group_.message_bytes());
    if (out > 0 && group_.channel(peer).send(transfer.out, out)) {
      transfer.out += out;
      transfer.out_left -= out;
      moved = true;
    }
    const std::size_t in = std::min(transfer.in_left, group_.message_bytes());
    if (in > 0 && group_.channel(peer).receive(transfer.in, in)) {
      transfer.in += in;
      transfer.in_left -= in;
      moved = true;
    }
    if (transfer.out_left + transfer.in_left > 0) waits_for_ = peer;
  }
  return moved;
}

bool PipedCopy::complete() {
  return std::ranges::all_of(transfers_, [](const Transfer& transfer) {
    return transfer.out_left + transfer.in_left == 0;
  });
}

void PipedCopy::run() {
  while (!complete()) {
    group_.wait([this] { return step(); }, [this] { return waits_for_; });
  }
}

}  // namespace hsdp::comm
