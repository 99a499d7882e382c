// Streams and events on a GPU.
#include <cuda_runtime.h>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "hsdp/device/cuda_call.h"
#include "hsdp/device/cuda_device.h"
#include "hsdp/device/cuda_stream_pool.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

// Whether `status`, returned by a query, means that the work is done.
bool is_done(cudaError_t status, Device device, const char* what) {
  if (status != cudaErrorNotReady) {
    check_cuda(status, device, what);
    return true;
  }
  static_cast<void>(cudaGetLastError());
  return false;
}

class CudaEvent : public Event::State {
 public:
  CudaEvent(Device device, cudaStream_t stream) : device_(device) {
    // A waiting host thread sleeps: there may be more ranks than cores.
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync),
               device, "make an event");
    const cudaError_t status = cudaEventRecord(event_, stream);
    if (status != cudaSuccess) cudaEventDestroy(event_);
    check_cuda(status, device, "record an event");
  }
  ~CudaEvent() override {
    give_back_on(device_, [this] { cudaEventDestroy(event_); });
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  [[nodiscard]] bool complete() const override {
    const OnCudaDevice current(device_);
    return is_done(cudaEventQuery(event_), device_, "ask for an event");
  }
  void wait() const override {
    const OnCudaDevice current(device_);
    check_cuda(cudaEventSynchronize(event_), device_, "finish the work before an event");
  }
  void make_wait(cudaStream_t stream) const {
    check_cuda(cudaStreamWaitEvent(stream, event_, 0), device_, "wait for an event");
  }

 private:
  Device device_;
  cudaEvent_t event_ = nullptr;
};

// The event of a broken stream, or of one whose event could not be made. It still completes only
// when the device has finished its work, because memory that the work uses must live until then.
class FailedEvent : public Event::State {
 public:
  FailedEvent(Device device, cudaStream_t stream, const std::exception_ptr& error)
      : device_(device), stream_(stream) {
    error_ = error;  // clang-tidy mistakes an initializer for an exception that is not thrown
    try {
      const OnCudaDevice current(device);
      last_.emplace(device, stream);
    } catch (const Error&) {  // complete() then queries the stream itself
    }
  }
  [[nodiscard]] bool complete() const override {
    if (last_) return last_->complete();
    const OnCudaDevice current(device_);
    return is_done(cudaStreamQuery(stream_), device_, "ask for a stream");
  }
  void wait() const override {
    while (!complete()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::rethrow_exception(error_);
  }
  void throw_if_failed() const override { std::rethrow_exception(error_); }

 private:
  Device device_;
  cudaStream_t stream_;
  std::exception_ptr error_;
  std::optional<CudaEvent> last_;
};

// The first error of a queue. Driver callbacks may outlive the queue, so they share it.
class FirstError {
 public:
  void set(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  [[nodiscard]] std::exception_ptr get() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

struct HostWait {
  Event event;
  std::shared_ptr<FirstError> error;
};

// Runs on a driver thread, which must not call CUDA.
void wait_on_driver_thread(void* argument) {
  const std::unique_ptr<HostWait> wait(static_cast<HostWait*>(argument));
  try {
    wait->event.wait();
  } catch (...) {
    wait->error->set(std::current_exception());
  }
}

thread_local bool in_task = false;

class CudaQueue : public Stream::Queue {
 public:
  CudaQueue(Device device, cudaStream_t stream, bool owned)
      : device_(device), stream_(stream), owned_(owned) {}
  ~CudaQueue() override {
    if (owned_) return_cuda_stream(device_, stream_);
  }
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  void run(std::function<void()> task) override {
    require_no_capture();
    const std::lock_guard lock(mutex_);
    if (error_->get()) return;
    const bool outer = std::exchange(in_task, true);
    try {
      const OnCudaDevice current(device_);
      task();
    } catch (...) {
      error_->set(std::current_exception());
    }
    in_task = outer;
  }

  Event record() override {
    require_no_capture();
    const std::lock_guard lock(mutex_);
    std::exception_ptr error = error_->get();
    if (!error) {
      try {
        const OnCudaDevice current(device_);
        return Event(std::make_shared<CudaEvent>(device_, stream_));
      } catch (...) {  // the event's own error
        error = std::current_exception();
      }
    }
    return Event(std::make_shared<FailedEvent>(device_, stream_, error));
  }

  void wait(const Event& of_anything) override {
    const Event event = of_anything.enqueued();
    if (event.state() == nullptr) return;
    event.throw_if_failed();  // throw here: the owner of this stream may never check it
    run([&] {
      if (const auto* const other = dynamic_cast<const CudaEvent*>(event.state())) {
        other->make_wait(stream_);
      } else if (event.complete()) {
        event.wait();
      } else {
        auto wait = std::make_unique<HostWait>(HostWait{event, error_});
        check_cuda(cudaLaunchHostFunc(stream_, wait_on_driver_thread, wait.get()), device_,
                   "wait for an event of the host");
        static_cast<void>(wait.release());  // now owned by the callback
      }
    });
  }

  void synchronize() override {
    require_no_capture();
    {
      const OnCudaDevice current(device_);
      const cudaError_t status = cudaStreamSynchronize(stream_);
      if (const std::exception_ptr error = error_->get()) std::rethrow_exception(error);
      check_cuda(status, device_, "finish the work of a stream");
    }
  }

  [[nodiscard]] Device device() const override { return device_; }
  [[nodiscard]] void* native_handle() const override { return stream_; }
  void require_no_capture() const override {
    if (!owned_) hsdp::require_no_capture(device_, stream_);
  }

 private:
  Device device_;
  cudaStream_t stream_;
  bool owned_;
  std::recursive_mutex mutex_;  // one task at a time; a task may use its own stream
  std::shared_ptr<FirstError> error_ = std::make_shared<FirstError>();  // once set, tasks are
                                                                        // dropped
};

}  // namespace

std::shared_ptr<Stream::Queue> make_cuda_queue(Device device, const std::string& /*name*/) {
  require_cuda(device);
  const OnCudaDevice current(device);
  return std::make_shared<CudaQueue>(device, static_cast<cudaStream_t>(take_cuda_stream(device)),
                                     true);
}

std::shared_ptr<Stream::Queue> borrow_cuda_queue(Device device, void* native_handle) {
  require_cuda(device);
  return std::make_shared<CudaQueue>(device, static_cast<cudaStream_t>(native_handle), false);
}

bool in_cuda_task() { return in_task; }

}  // namespace hsdp
