// The listeners of one rank, by topic: the receiving end of Control::tell(). Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "hsdp/comm/control.h"

namespace hsdp::comm {

class Listeners {
 public:
  // See Control::listen(). One listener per topic; a new one replaces it.
  [[nodiscard]] std::shared_ptr<void> add(std::string_view topic, Control::Hear hear);
  void call(std::string_view topic, int from, std::string_view message);

 private:
  struct Listener {
    std::recursive_mutex mutex;  // recursive: the listener may drop its own handle
    std::shared_ptr<Control::Hear> hear;
  };

  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Listener>, std::less<>> listeners_;
};

}  // namespace hsdp::comm
