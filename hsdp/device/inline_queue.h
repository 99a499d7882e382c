// The host queue that runs its work at once on the calling thread. Internal to hsdp/device.
//
// Thread-safe: work of several threads runs one task at a time, except for tasks that a task of
// this queue runs itself.
#pragma once

#include <exception>
#include <functional>
#include <mutex>

#include "hsdp/device/stream.h"

namespace hsdp {

class InlineQueue : public Stream::Queue {
 public:
  void run(std::function<void()> task) override;
  Event record() override;
  void wait(const Event& event) override;
  void synchronize() override;
  [[nodiscard]] Device device() const override { return {}; }

 private:
  std::recursive_mutex mutex_;
  std::exception_ptr error_;  // the first one; set: tasks are dropped
};

}  // namespace hsdp
