// The host queue with a thread. Internal to hsdp/device.
//
// Thread-safe. The destructor drains the queue and joins. If one of the queue's own tasks drops the
// last reference, the thread drains the queue and then ends by itself.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "hsdp/device/stream.h"

namespace hsdp {

class WorkerQueue : public Stream::Queue {
 public:
  explicit WorkerQueue(const std::string& thread_name);
  ~WorkerQueue() override;
  WorkerQueue(const WorkerQueue&) = delete;
  WorkerQueue& operator=(const WorkerQueue&) = delete;

  void run(std::function<void()> task) override;
  Event record() override;
  void wait(const Event& event) override;
  void synchronize() override;  // UsageError when called from one of the queue's own tasks
  [[nodiscard]] Device device() const override { return {}; }

 private:
  struct State;  // shared with the thread, which may outlive the queue
  static void work(State& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace hsdp
