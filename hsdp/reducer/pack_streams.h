// Where gradients are packed: on the calling thread on the host, on streams of their own on a GPU,
// one per staging slot, so that a pack that waits for its slot does not hold up the other slot's.
//
// Thread-safe. Nothing here waits for a GPU, but wait_idle(). On the host everything is complete
// when it returns, and all of this costs nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/in_flight.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

// Who keeps a gradient's memory, and for how long.
struct GradientOwner {
  std::shared_ptr<const void> keep_alive;
  KeptUntil until = KeptUntil::kRead;
};

class PackStreams {
 public:
  // Waits are the world's: they throw when it has ended and an event never comes.
  PackStreams(Device device, Communicator world);
  ~PackStreams();  // after the packs, whatever went wrong
  PackStreams(const PackStreams&) = delete;
  PackStreams& operator=(const PackStreams&) = delete;

  // `slot` < 0: work that is for no slot.
  [[nodiscard]] const Stream& of(int slot) const { return streams_[index(slot)]; }
  // Later packs for that slot come after `event`; on the host the caller waits for it.
  void wait(int slot, const Event& event);
  void wait_on_all(const Event& event);
  // What was enqueued so far for that slot, and for all.
  [[nodiscard]] Event record(int slot);
  [[nodiscard]] Event record_all();
  // Whatever comes next comes after everything so far.
  void join();
  // Keeps a gradient's memory until the packs enqueued so far have read it, where its owner does
  // not see to that.
  void hold(const GradientOwner& owner);
  // Each stream's own end so far; none on the host. reap_after() waits for them and lets go of what
  // was read.
  [[nodiscard]] std::vector<Event> record_each();
  void reap_after(const std::vector<Event>& packs);
  [[nodiscard]] const std::vector<Stream>& all() const { return streams_; }
  void wait_idle() noexcept;

 private:
  [[nodiscard]] std::size_t index(int slot) const {
    return slot < 0 ? 0 : static_cast<std::size_t>(slot) % streams_.size();
  }
  [[nodiscard]] bool on_host() const { return device_.type == DeviceType::kHost; }

  Device device_;
  Communicator world_;
  std::vector<Stream> streams_;
  InFlight in_flight_;
};

}  // namespace hsdp::reducer
