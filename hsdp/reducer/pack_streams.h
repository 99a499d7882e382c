// Where gradients are packed: on the calling thread on the host, on streams of their own on a GPU,
// one for each staging slot and one for local sums, so that a pack that waits for its slot does not
// hold up the others.
//
// On a GPU what is queued there is packed by launch(), many gradients at once. Calls come from one
// thread at a time, but for reap_after(), wait_idle() and, on the host, queue(). Nothing here waits
// for a GPU, but wait_idle(). On the host everything is complete when it returns, and all of this
// costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"
#include "hsdp/kernels/pack_queue.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

// Who keeps a gradient's memory, and for how long.
struct GradientOwner {
  std::shared_ptr<const void> keep_alive;
  KeptUntil until = KeptUntil::kRead;
};

// When several gradients are valid.
class AllValid {
 public:
  void add(const ValidAfter& valid);
  // The events to wait for, those of streams as of now.
  [[nodiscard]] std::vector<Event> events() const;
  [[nodiscard]] std::vector<Stream> streams() const;

 private:
  struct Source {
    Stream stream;
    bool has_event;  // that stands for what it had
  };
  std::vector<Source> sources_;
  std::vector<Event> events_;
};

class PackStreams {
 public:
  // A place beside the slots; kNoSlot: what goes straight into the carry.
  static constexpr int kSums = -2;

  // Waits are the world's: they throw when it has ended and an event never comes. `holes`: a rank's
  // bucket may wait for the end of the microbatch, for want of gradients.
  PackStreams(Device device, Communicator world, bool holes);
  ~PackStreams();  // after the packs, whatever went wrong
  PackStreams(const PackStreams&) = delete;
  PackStreams& operator=(const PackStreams&) = delete;

  [[nodiscard]] bool on_host() const { return device_.type == DeviceType::kHost; }
  [[nodiscard]] kernels::PackQueue& queue(int place) { return lane(place).queue; }
  [[nodiscard]] std::int64_t misaligned_bytes() const;  // of all queues
  // What is queued there from now on is packed after that; on the host the caller waits for it.
  void wait(int place, const Event& event);
  void wait_on_all(const Event& event);
  void wait(int place, const ValidAfter& valid);
  // Or after the local sums so far.
  void wait_for_sums(int place);
  // Keeps a gradient's memory until what is queued there has read it.
  void hold(int place, GradientOwner owner);

  // Packs what is queued there.
  void launch(int place);
  // Forgets what is queued. Its owners, to die when the packs that were launched are done.
  [[nodiscard]] std::vector<GradientOwner> forget();
  // What was launched so far: there, and on each stream (none on the host).
  [[nodiscard]] Event record(int place);
  [[nodiscard]] std::vector<Event> record_each();
  // Launches everything and records it.
  [[nodiscard]] Event record_all();
  // Whatever is launched next comes after everything so far.
  void join();
  void launch_all();
  // The streams of gradients may go: what is still to be read is kept until it is.
  void leave_streams();
  // Waits, and lets go of what was read.
  void reap_after(const std::vector<Event>& packs);
  void wait_idle() noexcept;  // for what was launched

  // Lets owners die at the end of its life: outside of whatever lock it comes before, as their
  // deleters may take locks of the caller's.
  class Farewell {
   public:
    explicit Farewell(PackStreams& packs) : packs_(packs) {}
    ~Farewell() { static_cast<void>(packs_.take_dead()); }
    Farewell(const Farewell&) = delete;
    Farewell& operator=(const Farewell&) = delete;

   private:
    PackStreams& packs_;
  };

 private:
  struct Lane {
    Stream stream;
    kernels::PackQueue queue;
    AllValid valid{};  // what is queued
    bool after_sums = false;
    std::vector<GradientOwner> owners{};
  };
  // What was launched together. With `streams`, its owners free it in the order of these.
  struct Launched {
    Event packed;
    std::vector<Stream> streams;
    std::vector<GradientOwner> owners;
  };
  [[nodiscard]] Lane& lane(int place) { return lanes_[index(place)]; }
  [[nodiscard]] std::size_t index(int place) const {
    if (on_host() || place == kNoSlot) return 0;
    return place == kSums ? kStagingSlots : static_cast<std::size_t>(place);
  }
  void let_go(int place, const std::vector<Stream>& streams);
  void keep(Launched launched);
  void order_oldest();
  void reap();
  void bury(Launched& launched);  // with the lock held
  [[nodiscard]] std::vector<GradientOwner> take_dead();

  Device device_;
  Communicator world_;
  bool holes_;
  std::vector<Lane> lanes_;
  std::mutex mutex_;
  std::deque<Launched> launched_;
  std::vector<GradientOwner> dead_;
};

}  // namespace hsdp::reducer
