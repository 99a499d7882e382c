#include "hsdp/reducer/pack_streams.h"

#include <utility>

#include "hsdp/reducer/gradient_memory.h"

namespace hsdp::reducer {

PackStreams::PackStreams(Device device, Communicator world)
    : device_(device), world_(std::move(world)) {
  if (on_host()) {
    streams_.push_back(Stream::inline_host());
    return;
  }
  for (int slot = 0; slot < kStagingSlots; ++slot) {
    streams_.push_back(Stream::create(device, "hsdp-pack"));
  }
}

PackStreams::~PackStreams() { wait_idle(); }

void PackStreams::wait(int slot, const Event& event) {
  if (on_host()) {
    event.wait();
  } else {
    streams_[index(slot)].wait(event);
  }
}

void PackStreams::wait_on_all(const Event& event) {
  for (std::size_t s = 0; s < streams_.size(); ++s) wait(static_cast<int>(s), event);
}

Event PackStreams::record(int slot) { return on_host() ? Event() : streams_[index(slot)].record(); }

Event PackStreams::record_all() {
  if (on_host()) return {};
  join();
  return record(0);
}

void PackStreams::join() {
  if (on_host()) return;
  in_flight_.reap();
  for (std::size_t s = 1; s < streams_.size(); ++s) streams_[0].wait(streams_[s].record());
  const Event all = streams_[0].record();
  for (std::size_t s = 1; s < streams_.size(); ++s) streams_[s].wait(all);
}

void PackStreams::hold(const GradientOwner& owner) {
  if (on_host() || owner.keep_alive == nullptr || owner.until == KeptUntil::kEnqueued) return;
  for (Stream& stream : streams_) in_flight_.hold(stream.record(), owner.keep_alive);
}

std::vector<Event> PackStreams::record_each() {
  std::vector<Event> packs;
  if (on_host()) return packs;
  for (Stream& stream : streams_) packs.push_back(stream.record());
  return packs;
}

void PackStreams::reap_after(const std::vector<Event>& packs) {
  for (const Event& pack : packs) world_.wait(pack);
  in_flight_.reap();
}

void PackStreams::wait_idle() noexcept {
  for (Stream& stream : streams_) {
    try {
      world_.wait(stream.record());
    } catch (...) {  // was reported when it happened
    }
  }
  in_flight_.reap();
}

}  // namespace hsdp::reducer
