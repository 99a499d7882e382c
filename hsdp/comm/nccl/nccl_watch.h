// Watches the communicators of one rank: errors that NCCL finds out about late, collectives that
// the GPU does not finish, and the end of the world, at which it aborts all of them.
//
// A collective that the GPU has begun and not finished is a wait of this rank for Control, which
// judges it like any other: who is at fault, and how long is too long. Owns one thread. Aborts and
// tear-downs run on threads of their own, because NCCL may hang in them; nobody waits for these
// without a limit. Thread-safe. [Note: NCCL without blocking]
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/long_wait.h"
#include "hsdp/comm/nccl/nccl_library.h"
#include "hsdp/device/event.h"
#include "hsdp/tensor_view.h"

namespace hsdp::comm {

class NcclLink;

class NcclWatch {
 public:
  NcclWatch(std::shared_ptr<Control> control, std::shared_ptr<const NcclLibrary> library,
            Device device);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  void add(NcclLink* link);
  void remove(NcclLink* link);
  // A collective that the GPU does between the two events. Where it takes long `tell` is called
  // now and then, by a thread of the watch.
  void follow(const NcclLink* link, WaitState call, std::function<void()> tell, const Event& begun,
              const Event& done);
  // A wait of the host's, likewise, while the handle lives.
  [[nodiscard]] std::shared_ptr<void> follow_wait(std::function<void()> tell);
  // Ends a communicator that nothing uses any more; where that is by an abort, sets its `poison`
  // first, which lives for good.
  void tear_down(NcclHandle handle, std::atomic<std::uint32_t>& poison);
  // Of communicators that have no word of their own.
  [[nodiscard]] std::atomic<std::uint32_t>& poison() const { return poison_; }
  // From here on events are complete because collectives were aborted.
  [[nodiscard]] bool aborting() const { return aborting_; }
  // The abort that follows the world's failure is over, on this rank.
  [[nodiscard]] bool aborted() const;

 private:
  struct HostWait {
    std::function<void()> tell;
    LongWait wait{};
  };
  struct Followed {
    const NcclLink* link;
    WaitState call;
    std::function<void()> tell;
    Event begun;
    Event done;
    std::optional<LongWait> wait{};  // once it has begun
    int slot = -1;                   // of the wait that Control was told of
  };
  // What threads that may hang share with this; they outlive it then.
  struct Ending {
    std::mutex mutex;
    std::condition_variable changed;
    int tear_downs = 0;
    bool aborted = false;
  };

  void watch();
  std::optional<Failure> look();
  void look_at_collectives();
  [[nodiscard]] std::vector<std::function<void()>> take_long_waits();
  [[nodiscard]] std::optional<Failure> look_at_links();
  void abort_all();

  std::shared_ptr<Control> control_;
  std::shared_ptr<const NcclLibrary> library_;
  Device device_;
  std::shared_ptr<Ending> ending_ = std::make_shared<Ending>();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<NcclLink*> links_;
  std::deque<Followed> followed_;
  std::vector<Followed> done_;  // to be let go of without the mutex
  std::list<HostWait> waits_;
  std::chrono::steady_clock::time_point error_since_;
  bool closing_ = false;
  std::atomic<bool> aborting_{false};
  std::atomic<std::uint32_t>& poison_;
  bool failed_ = false;
  std::shared_ptr<void> on_failure_;
  std::thread thread_;
};

}  // namespace hsdp::comm
