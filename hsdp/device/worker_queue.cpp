#include "hsdp/device/worker_queue.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/device/host_event.h"
#include "hsdp/device/run_front.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

struct Item {
  std::function<void()> task;        // either this
  std::shared_ptr<HostEvent> event;  // or this, finished even after an error
};

}  // namespace

struct WorkerQueue::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;
  bool busy = false;  // an item is out of the queue but not done
  bool closing = false;
  std::exception_ptr error;  // the first error; once set, tasks are dropped
};

WorkerQueue::WorkerQueue(const std::string& thread_name) : state_(std::make_shared<State>()) {
  const AllSignalsBlocked blocked;
  thread_ = std::thread([state = state_] { work(*state); });
  constexpr std::size_t kLongestName = 15;
  pthread_setname_np(thread_.native_handle(), thread_name.substr(0, kLongestName).c_str());
}

WorkerQueue::~WorkerQueue() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void WorkerQueue::work(State& state) {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return state.closing || !state.items.empty(); });
    if (state.items.empty()) return;
    run_front(lock, state);
  }
}

void WorkerQueue::run(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->error) return;
    state_->items.push_back({std::move(task), nullptr});
  }
  state_->changed.notify_one();
}

Event WorkerQueue::record() {
  auto event = std::make_shared<HostEvent>();
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->items.empty() && !state_->busy) {
      if (!state_->error) return {};
      event->finish(state_->error);
      return Event(std::move(event));
    }
    state_->items.push_back({nullptr, event});
  }
  state_->changed.notify_one();
  return Event(std::move(event));
}

void WorkerQueue::wait(const Event& event) {
  run([event] { event.wait(); });
}

void WorkerQueue::synchronize() {
  if (thread_.get_id() == std::this_thread::get_id()) {
    throw UsageError({.where = "stream: synchronize",
                      .expected = "a call from another thread",
                      .got = "one from a task of the stream itself"});
  }
  record().wait();
}

}  // namespace hsdp
