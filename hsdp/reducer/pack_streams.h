// Where gradients are packed: on the host on the calling thread; on a GPU on separate streams, one
// for each staging slot and one for local sums, so that a pack that waits for its slot does not
// hold up the others.
//
// On a GPU launch() packs many queued gradients at once. Calls come from one thread at a time,
// except reap_after(), wait_idle() and, on the host, queue(). Only wait_idle() and reap_after()
// wait for a GPU. On the host every call completes before it returns.
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

// Keeps a gradient's memory alive for as long as `until` says.
struct GradientOwner {
  std::shared_ptr<const void> keep_alive;
  KeptUntil until = KeptUntil::kRead;
};

// Collects the events and streams after which a set of gradients is valid.
class AllValid {
 public:
  void add(const ValidAfter& valid);
  // The events to wait for; records one now on each stream that has none.
  [[nodiscard]] std::vector<Event> events() const;
  [[nodiscard]] std::vector<Stream> streams() const;

 private:
  struct Source {
    Stream stream;
    bool has_event;  // which covers the stream's work so far
  };
  std::vector<Source> sources_;
  std::vector<Event> events_;
};

class PackStreams {
 public:
  // The place of local sums. The others are the slots, and kNoSlot for what goes straight into the
  // carry.
  static constexpr int kSums = -2;

  // Waits throw when the world has ended. `holes`: a bucket may lack gradients, and then waits for
  // the end of the microbatch.
  PackStreams(Device device, Communicator world, bool holes);
  ~PackStreams();  // waits for the packs, even after errors
  PackStreams(const PackStreams&) = delete;
  PackStreams& operator=(const PackStreams&) = delete;

  [[nodiscard]] bool on_host() const { return device_.type == DeviceType::kHost; }
  [[nodiscard]] kernels::PackQueue& queue(int place) { return lane(place).queue; }
  [[nodiscard]] std::int64_t misaligned_bytes() const;  // of all queues
  // Orders packs queued at that place from now on after the event; on the host, blocks until it
  // completes.
  void wait(int place, const Event& event);
  void wait_on_all(const Event& event);
  void wait(int place, const ValidAfter& valid);
  // The same after the local sums so far.
  void wait_for_sums(int place);
  // Keeps a gradient's memory until the packs queued at that place have read it.
  void hold(int place, GradientOwner owner);

  // Launches the packs queued at that place.
  void launch(int place);
  // Forgets what is queued. Returns its owners, to be destroyed after the packs already launched.
  [[nodiscard]] std::vector<GradientOwner> forget();
  // Events of the launches so far, at that place and on each stream; none on the host.
  [[nodiscard]] Event record(int place);
  [[nodiscard]] std::vector<Event> record_each();
  // Launches everything and records it.
  [[nodiscard]] Event record_all();
  // Later launches come after all earlier ones.
  void join();
  void launch_all();
  // After this the streams of gradients may be destroyed; their memory is kept until it was read.
  void leave_streams();
  // Waits for `packs`, and releases gradients that were read.
  void reap_after(const std::vector<Event>& packs);
  void wait_idle() noexcept;  // for everything launched

  // Destroys owners at the end of its scope. Declare it before a lock: their deleters may take
  // locks of the caller.
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
  // Gradients that were launched together. With `streams`, their memory is freed in stream order.
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
