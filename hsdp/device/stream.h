// An ordered queue of work: everything asynchronous in the library runs on a Stream
// [Note: kernels on a stream].
//
// Host: `inline_host()` runs work immediately on the calling thread, `host_worker()` has one thread
// and a queue. CUDA: a cudaStream, owned or borrowed (a framework's current stream). Copies share
// the queue. Thread-safe. The last copy of a worker drains the queue and joins.
//
// A task that throws breaks the stream: later tasks are dropped, and synchronize(), later record()
// events and wait() on those events rethrow that first error. Nothing hangs. Any stream can wait
// for any event; while a GPU waits for the host, it occupies a driver thread.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "hsdp/device/event.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

class Stream {
 public:
  class Queue {  // implemented per device
   public:
    virtual ~Queue() = default;
    virtual void run(std::function<void()> task) = 0;
    virtual Event record() = 0;
    virtual void wait(const Event& event) = 0;
    virtual void synchronize() = 0;
    [[nodiscard]] virtual Device device() const = 0;
    [[nodiscard]] virtual void* native_handle() const { return nullptr; }
    virtual void require_no_capture() const {}
  };

  explicit Stream(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}

  [[nodiscard]] static Stream inline_host();
  [[nodiscard]] static Stream host_worker(const std::string& thread_name);
  // A new asynchronous stream of `device`: a worker on the host, a cudaStream on a GPU.
  [[nodiscard]] static Stream create(Device device, const std::string& name);
  // A borrowed stream, such as a framework's current one: a cudaStream_t, or nullptr for the legacy
  // default stream. Its owner keeps it alive. On the host it is inline.
  [[nodiscard]] static Stream borrow(Device device, void* native_handle);

  // Runs `task` on the host in stream order. On CUDA, calls `task` immediately; it enqueues work on
  // native_handle().
  void run(std::function<void()> task) { queue_->run(std::move(task)); }
  // Returns an event that completes when all work enqueued so far is done.
  [[nodiscard]] Event record() { return queue_->record(); }
  // Later work of this stream starts after `event`. An inline stream waits here. An asynchronous
  // stream does not block the caller, except on a GPU until the event's own work is enqueued. On a
  // GPU, throws the error of an event that has already failed.
  void wait(const Event& event) { queue_->wait(event); }
  // In a task, on its inside_task(): what the task does next comes after all of them. On the host
  // this waits, and throws what went wrong there.
  void wait_in_task(std::span<const Event> events) const;
  void synchronize() { queue_->synchronize(); }

  // The Stream that a task of this stream passes to library calls: inline on a host worker, whose
  // thread already runs the task; this stream itself where work is only enqueued (CUDA).
  [[nodiscard]] Stream inside_task() const;

  // Throws UsageError while a CUDA graph is being captured from a borrowed stream. Every other call
  // does the same.
  void require_no_capture() const { queue_->require_no_capture(); }

  [[nodiscard]] Device device() const { return queue_->device(); }
  [[nodiscard]] void* native_handle() const { return queue_->native_handle(); }
  [[nodiscard]] bool same_queue(const Stream& other) const { return queue_ == other.queue_; }

 private:
  std::shared_ptr<Queue> queue_;
};

}  // namespace hsdp
