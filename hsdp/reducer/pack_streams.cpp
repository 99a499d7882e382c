#include "hsdp/reducer/pack_streams.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

// With more launches under way, a stream that frees their gradients waits for the oldest. As many
// as there are staging slots.
constexpr std::ptrdiff_t kMostLaunched = 2;

Event recorded(Stream& stream) {
  Event event = stream.record();
  event.throw_if_failed();
  return event;
}

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
    if (!source.has_event) all.push_back(recorded(source.stream));
  }
  return all;
}

std::vector<Stream> AllValid::streams() const {
  std::vector<Stream> all;
  for (const Source& source : sources_) all.push_back(source.stream);
  return all;
}

PackStreams::PackStreams(Device device, Communicator world, bool holes)
    : device_(device), world_(std::move(world)), holes_(holes) {
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
  if (on_host()) return event.wait();
  lane(place).stream.wait(event);
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

void PackStreams::hold(int place, GradientOwner owner) {
  if (!on_host() && owner.keep_alive != nullptr) lane(place).owners.push_back(std::move(owner));
}

void PackStreams::launch(int place) {
  if (on_host()) return;
  Lane& lane = this->lane(place);
  if (std::exchange(lane.after_sums, false)) {
    launch(kSums);
    lane.stream.wait(record(kSums));
  }
  for (const Event& event : lane.valid.events()) lane.stream.wait(event);  // or nothing is launched
  const AllValid valid = std::exchange(lane.valid, {});
  lane.queue.launch(lane.stream);
  let_go(place, valid.streams());
}

// Returns memory to its allocator without a wait of the host, and before it becomes much.
void PackStreams::let_go(int place, const std::vector<Stream>& streams) {
  Lane& lane = this->lane(place);
  if (lane.owners.empty()) return;
  reap();
  const Event packed = recorded(lane.stream);
  // A pack into a slot waits for a hop, and so for the peers' packs. If one of these may come last
  // in a microbatch, a stream that waited for it could hold that rank up.
  const bool may_wait = !streams.empty() && !(holes_ && place >= 0);
  Launched ordered{packed, streams, {}};
  Launched others{packed, {}, {}};
  for (GradientOwner& owner : lane.owners) {
    const bool is_ordered = may_wait && owner.until == KeptUntil::kOrdered;
    (is_ordered ? ordered : others).owners.push_back(std::move(owner));
  }
  lane.owners.clear();
  keep(std::move(others));
  keep(std::move(ordered));
  order_oldest();
}

void PackStreams::keep(Launched launched) {
  if (launched.owners.empty()) return;
  const std::lock_guard lock(mutex_);
  launched_.push_back(std::move(launched));
}

void PackStreams::order_oldest() {
  const auto is_ordered = [](const Launched& one) { return !one.streams.empty(); };
  const std::lock_guard lock(mutex_);
  while (std::ranges::count_if(launched_, is_ordered) > kMostLaunched) {
    const auto oldest = std::ranges::find_if(launched_, is_ordered);
    try {
      // An event that failed is also complete; it must not break the caller's stream.
      for (Stream& stream : oldest->streams) {
        if (!oldest->packed.complete()) stream.wait(oldest->packed);
      }
    } catch (const UsageError&) {  // being captured: reap() frees the memory
      oldest->streams.clear();
      continue;
    }
    bury(*oldest);
    launched_.erase(oldest);
  }
}

void PackStreams::leave_streams() {
  const std::lock_guard lock(mutex_);
  for (Launched& one : launched_) one.streams.clear();
}

void PackStreams::reap() {
  const std::lock_guard lock(mutex_);
  std::erase_if(launched_, [this](Launched& one) {
    const bool is_read = one.packed.complete();
    if (is_read) bury(one);
    return is_read;
  });
}

void PackStreams::bury(Launched& launched) {
  std::ranges::move(std::exchange(launched.owners, {}), std::back_inserter(dead_));
}

std::vector<GradientOwner> PackStreams::take_dead() {
  if (on_host()) return {};
  const std::lock_guard lock(mutex_);
  return std::exchange(dead_, {});
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

Event PackStreams::record(int place) { return on_host() ? Event() : recorded(lane(place).stream); }

void PackStreams::launch_all() {
  for (const int place : {kSums, 0, 1}) launch(place);
}

std::vector<Event> PackStreams::record_each() {
  std::vector<Event> packs;
  if (on_host()) return packs;
  for (Lane& lane : lanes_) packs.push_back(recorded(lane.stream));
  return packs;
}

Event PackStreams::record_all() {
  if (on_host()) return {};
  launch_all();
  join();
  return recorded(lanes_.front().stream);
}

void PackStreams::join() {
  if (on_host()) return;
  reap();
  Stream& first = lanes_.front().stream;
  for (const Event& event : record_each()) first.wait(event);
  const Event all = recorded(first);
  for (Lane& lane : lanes_) lane.stream.wait(all);
}

void PackStreams::reap_after(const std::vector<Event>& packs) {
  const Farewell farewell(*this);
  for (const Event& pack : packs) world_.wait(pack);
  reap();
}

void PackStreams::wait_idle() noexcept {
  const Farewell farewell(*this);
  for (Lane& lane : lanes_) {
    try {
      world_.wait(lane.stream.record());
    } catch (...) {  // was reported when it happened
    }
  }
  try {
    reap();
  } catch (...) {  // the device has failed
  }
}

}  // namespace hsdp::reducer
