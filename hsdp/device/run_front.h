// Runs the next item of a queue of host tasks. Internal to hsdp/device and hsdp/comm.
#pragma once

#include <exception>
#include <mutex>
#include <utility>

namespace hsdp {

// Takes the item at the front of `queue.items`, and releases `lock`, which guards the queue, while
// it runs. An item has a `task` or an `event`. `queue.error` keeps the first error of a task: later
// tasks are dropped, and events finish with that error. `queue.busy` is true while the item runs.
template <typename Queue>
void run_front(std::unique_lock<std::mutex>& lock, Queue& queue) {
  auto item = std::move(queue.items.front());
  queue.items.pop_front();
  queue.busy = true;
  std::exception_ptr error = queue.error;
  lock.unlock();
  if (item.event) {
    item.event->finish(error);
  } else if (!error) {
    try {
      item.task();
    } catch (...) {
      error = std::current_exception();
    }
  }
  item = {};  // outside the lock: destroys what the task holds before the next task runs
  lock.lock();
  if (!queue.error) queue.error = std::move(error);
  queue.busy = false;
}

}  // namespace hsdp
