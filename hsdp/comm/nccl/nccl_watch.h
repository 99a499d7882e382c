// Watches the communicators of one rank for errors that NCCL reports late, collectives that the GPU
// does not finish, and the world's end, when it aborts all of them.
//
// A collective that the GPU has begun and not finished counts as a wait of this rank; Control
// judges it like any other: which rank is at fault, and how long is too long. Owns one thread.
// Aborts and tear-downs run on separate threads, because NCCL may hang in them; waits for these are
// always bounded. Thread-safe. [Note: NCCL without blocking]
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
  // Follows a collective that the GPU runs between the two events. If it takes long, a thread of
  // the watch calls `tell` now and then.
  void follow(const NcclLink* link, WaitState call, std::function<void()> tell, const Event& begun,
              const Event& done);
  // Follows a wait of the host in the same way, while the handle lives.
  [[nodiscard]] std::shared_ptr<void> follow_wait(std::function<void()> tell);
  // Ends a communicator that is no longer used. If that takes an abort, first sets its `poison`,
  // which is never freed.
  void tear_down(NcclHandle handle, std::atomic<std::uint32_t>& poison);
  // For communicators that have no separate word.
  [[nodiscard]] std::atomic<std::uint32_t>& poison() const { return poison_; }
  // From now on events may be complete only because collectives were aborted.
  [[nodiscard]] bool aborting() const { return aborting_; }
  // Whether the abort after the world's failure is over on this rank.
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
    std::optional<LongWait> wait{};  // set once it has begun
    int slot = -1;                   // of the wait announced to Control
  };
  // Shared with threads that may hang and then outlive the watch.
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
  std::vector<Followed> done_;  // destroyed without holding the mutex
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
