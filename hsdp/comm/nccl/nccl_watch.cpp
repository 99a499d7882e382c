#include "hsdp/comm/nccl/nccl_watch.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/nccl/nccl_link.h"
#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/device/cuda_call.h"
#include "hsdp/device/flag.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kBusyPeriod{5};
constexpr milliseconds kIdlePeriod{100};
constexpr milliseconds kTearDownLimit{5'000};

// NCCL finishes what is in flight, with the peers' help, then frees it. Returns true once it has.
bool finalize_and_destroy(const NcclLibrary& library, const Control& control, NcclHandle handle) {
  if (control.failed()) return false;  // it may be unsettled
  const auto end = Clock::now() + kTearDownLimit;
  try {
    library.begin_finalize(handle);
    NcclStatus status = library.status(handle);
    while (status.state == NcclStatus::State::kInProgress) {
      if (control.failed() || Clock::now() > end) return false;
      std::this_thread::sleep_for(milliseconds(1));
      status = library.status(handle);
    }
    if (status.failed()) return false;
    library.destroy(handle);
  } catch (const NcclError&) {  // it is no longer usable
    return false;
  }
  return true;
}

}  // namespace

NcclWatch::NcclWatch(std::shared_ptr<Control> control, std::shared_ptr<const NcclLibrary> library,
                     Device device)
    : control_(std::move(control)),
      library_(std::move(library)),
      device_(device),
      poison_(keep_for_good(make_flag(device))) {
  on_failure_ = control_->on_failure([this] {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  });
  const AllSignalsBlocked blocked;
  thread_ = std::thread([this] { watch(); });
  ::pthread_setname_np(thread_.native_handle(), "hsdp-nccl");
}

NcclWatch::~NcclWatch() {
  on_failure_.reset();
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (const Followed& followed : followed_) {
    if (followed.slot >= 0) control_->end_wait(followed.slot);
  }
  std::unique_lock lock(ending_->mutex);
  ending_->changed.wait_for(lock, kTearDownLimit + milliseconds(1'000),
                            [this] { return ending_->tear_downs == 0; });
}

void NcclWatch::add(NcclLink* link) {
  const std::lock_guard lock(mutex_);
  links_.push_back(link);
}

void NcclWatch::remove(NcclLink* link) {
  const std::lock_guard lock(mutex_);
  std::erase(links_, link);
}

void NcclWatch::follow(const NcclLink* link, WaitState call, std::function<void()> tell,
                       const Event& begun, const Event& done) {
  {
    const std::lock_guard lock(mutex_);
    followed_.push_back({link, call, std::move(tell), begun, done});
  }
  changed_.notify_all();
}

std::shared_ptr<void> NcclWatch::follow_wait(std::function<void()> tell) {
  const std::lock_guard lock(mutex_);
  const auto wait = waits_.insert(waits_.end(), {std::move(tell)});
  return {nullptr, [this, wait](void* /*unused*/) {
            const std::lock_guard erasing(mutex_);
            waits_.erase(wait);
          }};
}

bool NcclWatch::aborted() const {
  const std::lock_guard lock(ending_->mutex);
  return ending_->aborted;
}

void NcclWatch::watch() {
  std::optional<OnCudaDevice> current;
  try {
    current.emplace(device_);
  } catch (const Error&) {  // the threads that use the GPU report it
  }
  std::unique_lock lock(mutex_);
  while (!closing_) {
    changed_.wait_for(lock, followed_.empty() ? kIdlePeriod : kBusyPeriod,
                      [this] { return closing_ || failed_; });
    if (closing_) return;
    if (!failed_ && !control_->failed()) {
      const std::optional<Failure> failure = look();
      std::vector<std::function<void()>> tells = take_long_waits();
      std::vector<Followed> done = std::exchange(done_, {});
      lock.unlock();  // their destructors may wait for a thread that needs it
      for (const auto& tell : tells) tell();
      if (failure) control_->fail(*failure);
      tells.clear();
      done.clear();
      lock.lock();
      continue;
    }
    failed_ = true;
    abort_all();
    changed_.wait(lock, [this] { return closing_; });
  }
}

std::optional<Failure> NcclWatch::look() {
  try {
    look_at_collectives();
  } catch (const Error& error) {  // the device cannot tell, and never will
    const std::string who = ranks_text({control_->rank()}, control_->size());
    return Failure{
        FailureKind::kAborted, "nccl: " + who + " failed: " + error.what(), {control_->rank()}};
  }
  return look_at_links();
}

// Announces to Control one collective at a time on each communicator, the oldest.
void NcclWatch::look_at_collectives() {
  std::vector<const NcclLink*> seen;
  for (auto followed = followed_.begin(); followed != followed_.end();) {
    if (followed->done.complete()) {
      if (followed->slot >= 0) control_->end_wait(followed->slot);
      done_.push_back(std::move(*followed));
      followed = followed_.erase(followed);
      continue;
    }
    const bool oldest = std::ranges::find(seen, followed->link) == seen.end();
    if (oldest) seen.push_back(followed->link);
    if (oldest && followed->slot < 0 && followed->begun.complete()) {
      followed->slot = control_->begin_wait(followed->call);
      if (!followed->wait) followed->wait.emplace();
    }
    ++followed;
  }
}

// Returns the calls of `tell` for waits that have become long.
std::vector<std::function<void()>> NcclWatch::take_long_waits() {
  std::vector<std::function<void()>> tells;
  for (HostWait& one : waits_) {
    if (one.wait.has_become_long()) tells.push_back(one.tell);
  }
  for (Followed& one : followed_) {
    if (one.wait && one.wait->has_become_long()) tells.push_back(one.tell);
  }
  return tells;
}

// The failure that follows from an NCCL error. For a lost peer, Control decides first, since it
// knows which one it was.
std::optional<Failure> NcclWatch::look_at_links() {
  for (NcclLink* const link : links_) {
    const NcclStatus status = link->look();
    if (!status.failed()) continue;
    const bool remote = status.state == NcclStatus::State::kRemoteError;
    if (error_since_ == Clock::time_point()) {
      error_since_ = Clock::now();
      for (Followed& followed : followed_) {  // a peer may have made a different call
        if (followed.link != link) continue;
        if (!followed.wait) followed.wait.emplace();
        followed.wait->hurry();
      }
    }
    if (Clock::now() - error_since_ < (remote ? kVerdictTime : kOwnVerdictTime)) continue;
    const auto call =
        std::ranges::find_if(followed_, [link](const Followed& f) { return f.link == link; });
    const WaitState named = call == followed_.end() ? WaitState{.operation = "nccl"} : call->call;
    return nccl_failure(*control_, remote, status.text, named);
  }
  return std::nullopt;
}

void NcclWatch::abort_all() {
  aborting_ = true;
  poison_ = 1;
  std::vector<NcclHandle> handles;
  for (NcclLink* const link : links_) {
    link->set_poison();
    if (NcclHandle const handle = link->take()) handles.push_back(handle);
  }
  const AllSignalsBlocked blocked;
  std::thread([library = library_, ending = ending_, device = device_, handles] {
    try {
      const OnCudaDevice current(device);
      for (NcclHandle const handle : handles) library->revoke(handle);
      library->group_start();
      for (NcclHandle const handle : handles) library->abort(handle);
      library->group_end();
    } catch (const std::exception&) {  // the world's failure was reported; nothing is left to do
    }
    const std::lock_guard lock(ending->mutex);
    ending->aborted = true;
    ending->changed.notify_all();
  }).detach();
}

void NcclWatch::tear_down(NcclHandle handle, std::atomic<std::uint32_t>& poison) {
  {
    const std::lock_guard lock(ending_->mutex);
    ++ending_->tear_downs;
  }
  const AllSignalsBlocked blocked;
  std::thread([library = library_, control = control_, ending = ending_, device = device_, handle,
               &poison] {
    try {
      const OnCudaDevice current(device);
      if (!finalize_and_destroy(*library, *control, handle)) {
        poison = 1;
        library->abort(handle);
      }
    } catch (const std::exception&) {  // no device, no communicator
    }
    const std::lock_guard lock(ending->mutex);
    --ending->tear_downs;
    ending->changed.notify_all();
  }).detach();
}

}  // namespace hsdp::comm
