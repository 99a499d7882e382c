// A point in a Stream that others can wait for.
//
// Cheap to copy; a default-constructed Event is complete. On CUDA it holds a cudaEvent; whatever
// recorded it, the host can poll it or wait for it, and every Stream can.
// Thread-safe.
#pragma once

#include <memory>
#include <utility>

namespace hsdp {

class Event {
 public:
  // What an engine stores behind the handle.
  class State {
   public:
    virtual ~State() = default;
    // Never true of work that goes on. A device that cannot tell is an Error.
    [[nodiscard]] virtual bool complete() const = 0;
    // Blocks the calling thread; rethrows the error of the task that broke the stream, if any.
    virtual void wait() const = 0;
    // Throws the error of work that was never enqueued, where that is known already.
    virtual void throw_if_failed() const {}
    // Where work for a device is enqueued by another thread: blocks until it is, and returns the
    // device's event. Null where the event is no such one, or the work could not be enqueued.
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
  // For a GPU's stream to wait for: the device's event of work that another thread has yet to
  // enqueue, for which it blocks. Else, and where that failed, the event itself.
  [[nodiscard]] Event enqueued() const {
    const Event* const of_device = state_ ? state_->enqueued() : nullptr;
    return of_device != nullptr ? *of_device : *this;
  }
  [[nodiscard]] const State* state() const { return state_.get(); }

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace hsdp
