#include "hsdp/comm/control/listeners.h"

#include <utility>

namespace hsdp::comm {

std::shared_ptr<void> Listeners::add(std::string_view topic, Control::Hear hear) {
  auto listener = std::make_shared<Listener>();
  listener->hear = std::make_shared<Control::Hear>(std::move(hear));
  const std::lock_guard lock(mutex_);
  std::erase_if(listeners_, [](const auto& entry) { return entry.second.expired(); });
  listeners_[std::string(topic)] = listener;
  return {listener.get(), [listener](void*) {
            std::shared_ptr<Control::Hear> dropped;  // destroyed outside the lock
            const std::lock_guard listener_lock(listener->mutex);
            dropped.swap(listener->hear);
          }};
}

void Listeners::call(std::string_view topic, int from, std::string_view message) {
  std::shared_ptr<Listener> listener;
  {
    const std::lock_guard lock(mutex_);
    const auto found = listeners_.find(topic);
    if (found != listeners_.end()) listener = found->second.lock();
  }
  if (listener == nullptr) return;
  const std::lock_guard lock(listener->mutex);
  const auto hear = listener->hear;  // a share, so that it lives while it runs
  if (hear != nullptr) (*hear)(from, message);
}

}  // namespace hsdp::comm
