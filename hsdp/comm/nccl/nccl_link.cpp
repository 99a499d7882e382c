#include "hsdp/comm/nccl/nccl_link.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/host/host_wait.h"
#include "hsdp/device/cuda_call.h"
#include "hsdp/device/flag.h"

namespace hsdp::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr WaitState kConnectLink{.operation = "connect"};
constexpr WaitState kSplit{.operation = "split"};
constexpr milliseconds kCallTime{1'000};  // NCCL's time to answer another call

// A separate word if memory allows: aborting one communicator should not poison others' results.
std::atomic<std::uint32_t>& make_poison(const NcclWorld& world) {
  try {
    return keep_for_good(make_flag(world.device));
  } catch (const Error&) {
    return world.watch->poison();
  }
}

}  // namespace

Failure nccl_failure(const Control& control, bool remote, const std::string& text, WaitState call) {
  return {.kind = remote ? FailureKind::kPeerLost : FailureKind::kAborted,
          .message = "nccl: " + operation_text(call.operation, call.bucket) +
                     ": expected success, got " + text + " (" +
                     ranks_text({control.rank()}, control.size()) + ")" +
                     (remote ? "; a peer ended, or the network to it failed" : ""),
          .ranks = {control.rank()}};
}

NcclLink::NcclLink(std::shared_ptr<NcclWorld> world, int size, int rank, const std::string& id)
    : world_(std::move(world)), poison_(make_poison(*world_)) {
  const OnCudaDevice current(world_->device);
  handle_ = world_->library->begin_init(size, id, rank);
  try {
    settle(kConnectLink);
  } catch (...) {
    world_->watch->tear_down(handle_, poison_);
    throw;
  }
  world_->watch->add(this);
}

NcclLink::NcclLink(std::shared_ptr<NcclWorld> world, NcclHandle handle)
    : world_(std::move(world)), handle_(handle), poison_(make_poison(*world_)) {
  world_->watch->add(this);
}

NcclLink::~NcclLink() {
  world_->watch->remove(this);
  NcclHandle const handle = take();
  if (handle != nullptr) world_->watch->tear_down(handle, poison_);
}

NcclHandle NcclLink::require_handle() const {
  NcclHandle const handle = handle_;
  if (handle != nullptr) return handle;
  world_->control->throw_if_failed();
  throw NcclError("the communicator was aborted", false);
}

std::unique_ptr<NcclLink> NcclLink::split(int color, int key) {
  const OnCudaDevice current(world_->device);
  auto child = std::make_unique<NcclHandle>(nullptr);  // a thread of NCCL writes it
  try {
    {
      const std::lock_guard lock(mutex_);
      world_->library->begin_split(require_handle(), color, key, child.get());
    }
    settle(kSplit);  // the child's handle is set only then
  } catch (...) {
    static_cast<void>(child.release());  // NCCL's thread may still run
    throw;
  }
  if (color < 0 || *child == nullptr) return nullptr;
  auto link = std::unique_ptr<NcclLink>(new NcclLink(world_, *child));
  link->settle(kSplit);
  return link;
}

void NcclLink::group(WaitState call, const std::function<void(NcclHandle)>& issue) {
  const NcclLibrary& library = *world_->library;
  {
    const std::lock_guard lock(mutex_);
    NcclHandle const handle = require_handle();
    library.group_start();
    try {
      issue(handle);
    } catch (...) {
      try {
        library.group_end();        // otherwise the next group would be part of this one
      } catch (const NcclError&) {  // follows from the first
      }
      throw;
    }
    library.group_end();
  }
  settle(call);
}

// Waits until NCCL has accepted the calls: later ones must not precede them.
void NcclLink::settle(WaitState call) {
  constexpr int kQuickLooks = 20;
  constexpr microseconds kShortest{20};
  constexpr microseconds kLongest{1'000};
  AnnouncedWait announced(*world_->control, call);
  auto pause = kShortest;
  for (int looks = 0;; ++looks) {
    NcclStatus status;
    {
      const std::lock_guard lock(mutex_);
      status = world_->library->status(require_handle());
    }
    if (status.state == NcclStatus::State::kSuccess) return;
    if (status.failed()) {
      throw NcclError(status.text, status.state == NcclStatus::State::kRemoteError);
    }
    world_->control->throw_if_failed();
    if (looks < kQuickLooks) continue;
    announced.waits_for(-1);
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongest);
  }
}

NcclStatus NcclLink::look() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  NcclHandle const handle = handle_;
  if (!lock.owns_lock() || handle == nullptr) return {};
  return world_->library->status(handle);
}

NcclHandle NcclLink::take() {
  // A thread that hangs in NCCL holds the lock; then abort without it.
  const auto end = std::chrono::steady_clock::now() + kCallTime;
  std::unique_lock lock(mutex_, std::try_to_lock);
  while (!lock.owns_lock() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
    static_cast<void>(lock.try_lock());
  }
  return handle_.exchange(nullptr);
}

void* NcclLink::enroll(void* memory, std::size_t bytes) {
  const OnCudaDevice current(world_->device);
  const std::lock_guard lock(mutex_);
  try {
    return world_->library->enroll(require_handle(), memory, bytes);
  } catch (const NcclError&) {  // it works without
    return nullptr;
  }
}

void NcclLink::withdraw(void* enrolled) noexcept {
  give_back_on(world_->device, [&] {
    const std::lock_guard lock(mutex_);
    NcclHandle const handle = handle_;
    if (handle != nullptr && enrolled != nullptr) world_->library->withdraw(handle, enrolled);
  });
}

}  // namespace hsdp::comm
