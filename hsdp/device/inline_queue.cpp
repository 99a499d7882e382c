#include "hsdp/device/inline_queue.h"

#include <memory>

#include "hsdp/device/host_event.h"

namespace hsdp {

void InlineQueue::run(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (error_) return;
  try {
    task();
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
}

Event InlineQueue::record() {
  const std::lock_guard lock(mutex_);
  if (!error_) return {};
  auto event = std::make_shared<HostEvent>();
  event->finish(error_);
  return Event(std::move(event));
}

void InlineQueue::wait(const Event& event) {
  run([&event] { event.wait(); });
}

void InlineQueue::synchronize() {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

}  // namespace hsdp
