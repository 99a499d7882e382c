// The host queue that runs its work immediately on the calling thread. Internal to hsdp/device.
//
// Thread-safe: tasks of several threads run one at a time. A task may run further tasks of its own
// queue.
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
  std::exception_ptr error_;  // the first error; once set, tasks are dropped
};

}  // namespace hsdp
