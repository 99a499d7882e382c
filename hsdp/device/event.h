// A point in a Stream that others can wait for.
//
// Cheap to copy; a default-constructed Event is complete. On CUDA it holds a cudaEvent. The host
// can poll and wait for any Event, and any Stream can wait for it, whatever recorded it.
// Thread-safe.
#pragma once

#include <memory>
#include <utility>

namespace hsdp {

class Event {
 public:
  // An engine's implementation behind the handle.
  class State {
   public:
    virtual ~State() = default;
    // Never true while the work is still running. Throws Error if the device cannot tell.
    [[nodiscard]] virtual bool complete() const = 0;
    // Blocks the calling thread; rethrows the error of the task that broke the stream, if any.
    virtual void wait() const = 0;
    // Throws the error of work that was never enqueued, if it is already known.
    virtual void throw_if_failed() const {}
    // For an event of device work that another thread enqueues: blocks until it is enqueued, then
    // returns the device's event. Null for any other event, or if the work could not be enqueued.
    [[nodiscard]] virtual const Event* enqueued() const { return nullptr; }
  };

  Event() = default;
  explicit Event(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  [[nodiscard]] bool complete() const { return !state_ || state_->complete(); }
  void wait() const {
    if (state_) state_->wait();
  }
  void throw_if_failed() const {
    if (state_) state_->throw_if_failed();
  }
  // The event that a GPU's stream should wait for. If another thread has yet to enqueue device
  // work, blocks until it has and returns the device's event. Otherwise, or if that failed, returns
  // *this.
  [[nodiscard]] Event enqueued() const {
    const Event* const of_device = state_ ? state_->enqueued() : nullptr;
    return of_device != nullptr ? *of_device : *this;
  }
  [[nodiscard]] const State* state() const { return state_.get(); }

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace hsdp
