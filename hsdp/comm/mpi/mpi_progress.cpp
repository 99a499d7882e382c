#include "hsdp/comm/mpi/mpi_progress.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <utility>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/device/all_signals_blocked.h"

namespace hsdp::comm {
namespace {

constexpr std::chrono::milliseconds kPause{5};

}  // namespace

struct MpiProgress::Worker {
  std::shared_ptr<MpiLink> link;
  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  std::thread thread;

  void run() {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kPause, [this] { return closing; })) {
      try {
        link->make_progress();
      } catch (const std::exception&) {  // finalized: the groups' calls report it
        return;
      }
    }
  }
};

MpiProgress::MpiProgress(std::shared_ptr<MpiLink> link)
    : worker_(std::make_unique<Worker>()), fork_generation_(comm::fork_generation()) {
  worker_->link = std::move(link);
  const AllSignalsBlocked blocked;
  worker_->thread = std::thread([worker = worker_.get()] { worker->run(); });
  ::pthread_setname_np(worker_->thread.native_handle(), "hsdp-mpi");
}

MpiProgress::~MpiProgress() {
  if (fork_generation_ != comm::fork_generation()) {
    static_cast<void>(worker_.release());  // the thread belongs to the parent
    return;
  }
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->closing = true;
  }
  worker_->changed.notify_all();
  worker_->thread.join();
}

}  // namespace hsdp::comm
