#include "hsdp/reducer/pack_streams.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hsdp::reducer {
namespace {

// Launches that may be under way before a stream that frees their gradients waits for the oldest:
// two buckets, as many as are staged.
constexpr std::size_t kMostLaunched = 2;

}  // namespace

void AllValid::add(const ValidAfter& valid) {
  if (valid.event) {
    const auto same = [&](const Event& one) { return one.state() == valid.event->state(); };
    if (std::ranges::none_of(events_, same)) events_.push_back(*valid.event);
  }
  if (!valid.stream) return;
  const auto found = std::ranges::find_if(
      sources_, [&](const Source& one) { return one.stream.same_queue(*valid.stream); });
  if (found == sources_.end()) {
    sources_.push_back({*valid.stream, valid.event.has_value()});
  } else if (!valid.event) {
    found->has_event = false;
  }
}

std::vector<Event> AllValid::events() const {
  std::vector<Event> all = events_;
  for (Source source : sources_) {
    if (!source.has_event) all.push_back(source.stream.record());
  }
  return all;
}

std::vector<Stream> AllValid::streams() const {
  std::vector<Stream> all;
  for (const Source& source : sources_) all.push_back(source.stream);
  return all;
}

PackStreams::PackStreams(Device device, Communicator world)
    : device_(device), world_(std::move(world)) {
  if (on_host()) {
    lanes_.push_back({Stream::inline_host(), kernels::PackQueue(device)});
    return;
  }
  for (int place = 0; place < kStagingSlots + 1; ++place) {
    lanes_.push_back({Stream::create(device, "hsdp-pack"), kernels::PackQueue(device)});
  }
}

PackStreams::~PackStreams() { wait_idle(); }

void PackStreams::wait(int place, const Event& event) {
  if (on_host()) {
    event.wait();
  } else {
    lane(place).stream.wait(event);
  }
}

void PackStreams::wait_on_all(const Event& event) {
  if (on_host()) return event.wait();
  for (Lane& lane : lanes_) lane.stream.wait(event);
}

void PackStreams::wait(int place, const ValidAfter& valid) {
  if (!on_host()) {
    lane(place).valid.add(valid);
  } else if (valid.event) {
    valid.event->wait();
  }
}

void PackStreams::wait_for_sums(int place) {
  if (!on_host()) lane(place).after_sums = true;
}

void PackStreams::hold(int place, const GradientOwner& owner) {
  if (!on_host() && owner.keep_alive != nullptr) lane(place).owners.push_back(owner);
}

void PackStreams::launch(int place) {
  if (on_host()) return;
  Lane& lane = this->lane(place);
  if (std::exchange(lane.after_sums, false)) {
    launch(kSums);
    lane.stream.wait(record(kSums));
  }
  for (const Event& event : lane.valid.events()) lane.stream.wait(event);
  const AllValid valid = std::exchange(lane.valid, {});
  lane.queue.launch(lane.stream);
  let_go(std::exchange(lane.owners, {}), lane.stream, valid.streams());
}

// Memory goes back to its allocator without a wait of the host, and there is never much of it.
void PackStreams::let_go(std::vector<GradientOwner> owners, Stream& packed_on,
                         const std::vector<Stream>& streams) {
  if (owners.empty()) return;
  reap();
  const Event packed = packed_on.record();
  std::vector<GradientOwner> ordered;
  std::vector<GradientOwner> others;
  for (GradientOwner& owner : owners) {
    const bool is_ordered = owner.until == KeptUntil::kOrdered && !streams.empty();
    (is_ordered ? ordered : others).push_back(std::move(owner));
  }
  if (!others.empty()) {
    in_flight_.hold(packed, std::make_shared<const std::vector<GradientOwner>>(std::move(others)));
  }
  if (ordered.empty()) return;
  const std::lock_guard lock(mutex_);
  launched_.push_back({packed, streams, std::move(ordered)});
  while (launched_.size() > kMostLaunched) {
    Launched& oldest = launched_.front();
    // Complete is also what failed, which must not break a stream of somebody else's.
    for (Stream& stream : oldest.streams) {
      if (!oldest.packed.complete()) stream.wait(oldest.packed);
    }
    launched_.pop_front();
  }
}

void PackStreams::reap() {
  in_flight_.reap();
  const std::lock_guard lock(mutex_);
  while (!launched_.empty() && launched_.front().packed.complete()) launched_.pop_front();
}

std::vector<GradientOwner> PackStreams::forget() {
  std::vector<GradientOwner> owners;
  for (Lane& lane : lanes_) {
    std::ranges::move(std::exchange(lane.owners, {}), std::back_inserter(owners));
    lane.queue.clear();
    lane.valid = {};
    lane.after_sums = false;
  }
  return owners;
}

std::int64_t PackStreams::misaligned_bytes() const {
  std::int64_t bytes = 0;
  for (const Lane& lane : lanes_) bytes += lane.queue.misaligned_bytes();
  return bytes;
}

Event PackStreams::record(int place) { return on_host() ? Event() : lane(place).stream.record(); }

void PackStreams::launch_all() {
  for (const int place : {kSums, 0, 1}) launch(place);
}

std::vector<Event> PackStreams::record_each() {
  std::vector<Event> packs;
  if (on_host()) return packs;
  for (Lane& lane : lanes_) packs.push_back(lane.stream.record());
  return packs;
}

Event PackStreams::record_all() {
  if (on_host()) return {};
  launch_all();
  join();
  return lanes_.front().stream.record();
}

void PackStreams::join() {
  if (on_host()) return;
  reap();
  Stream& first = lanes_.front().stream;
  for (const Event& event : record_each()) first.wait(event);
  const Event all = first.record();
  for (Lane& lane : lanes_) lane.stream.wait(all);
}

void PackStreams::reap_after(const std::vector<Event>& packs) {
  for (const Event& pack : packs) world_.wait(pack);
  reap();
}

void PackStreams::wait_idle() noexcept {
  for (Lane& lane : lanes_) {
    try {
      world_.wait(lane.stream.record());
    } catch (...) {  // was reported when it happened
    }
  }
  reap();
}

}  // namespace hsdp::reducer
