// The Event of host streams and of threads that run tasks: finished once, with or without an error.
// Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "hsdp/device/event.h"

namespace hsdp {

class HostEvent : public Event::State {
 public:
  [[nodiscard]] bool complete() const override {
    const std::lock_guard lock(mutex_);
    return done_;
  }

  void wait() const override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }

  // Whether it is done in that time.
  [[nodiscard]] bool wait_for(std::chrono::microseconds time) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return done_; });
  }

  void throw_if_failed() const override {
    const std::lock_guard lock(mutex_);
    if (done_ && error_) std::rethrow_exception(error_);
  }

  void finish(std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      error_ = std::move(error);
    }
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

}  // namespace hsdp
