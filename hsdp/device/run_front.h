// Runs the next item of a queue of host tasks, for the threads that work on one. Internal to
// hsdp/device and hsdp/comm.
#pragma once

#include <exception>
#include <mutex>
#include <utility>

namespace hsdp {

// Takes the item at the front of `queue.items` and runs it without the lock, which guards the
// queue. An item has a `task` or an `event`. `queue.error` keeps the first error of a task: later
// tasks are dropped, and events finish with it. `queue.busy` is true while the item runs.
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
  item = {};  // destroys what the task holds before the next task, outside the lock
  lock.lock();
  if (!queue.error) queue.error = std::move(error);
  queue.busy = false;
}

}  // namespace hsdp
