#include "hsdp/reducer/lane.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "hsdp/device/host_event.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

// Completes when a task has run and the device has done what it enqueued.
class TaskEvent final : public Event::State {
 public:
  explicit TaskEvent(std::weak_ptr<IssueOrder::Issuer> issuer) : issuer_(std::move(issuer)) {}
  [[nodiscard]] bool complete() const override { return ran_.complete() && device_.complete(); }
  void wait() const override {
    try {
      wait_until_run();
    } catch (...) {
      wait_for_device();
      throw;
    }
    device_.wait();
  }
  [[nodiscard]] const Event* enqueued() const override {
    try {
      wait_until_run();
      return &device_;
    } catch (...) {  // wait() throws it
      return nullptr;
    }
  }
  void finish(std::exception_ptr error, Event device) {
    device_ = std::move(device);
    ran_.finish(std::move(error));
  }

 private:
  void wait_until_run() const {
    if (const auto issuer = ran_.complete() ? nullptr : issuer_.lock()) {
      issuer->wait([this](std::chrono::microseconds time) { return ran_.wait_for(time); });
    }
    ran_.wait();
  }
  // Waits for what the task enqueued before it failed, though not forever if the GPU hangs.
  void wait_for_device() const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    try {
      while (!device_.complete() && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    } catch (const Error&) {  // the device has failed
    }
  }

  std::weak_ptr<IssueOrder::Issuer> issuer_;  // none on the host
  HostEvent ran_;
  Event device_;  // set when the task has run
};

}  // namespace

Lane::Lane(const char* name, Device device, Outcome& outcome,
           std::shared_ptr<IssueOrder::Issuer> issuer)
    : outcome_(outcome),
      issuer_(std::move(issuer)),
      thread_(issuer_ ? issuer_->stream() : Stream::host_worker(name)),
      device_(issuer_ ? Stream::create(device, name) : Stream::inline_host()) {}

// Otherwise no caller would see the error, and the thread would run no later task.
std::function<void()> Lane::with_errors_told(std::function<void()> task) {
  return [this, task = std::move(task)]() mutable {
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = {};
    if (error) outcome_.fail(std::move(error));
  };
}

void Lane::issue(Task task) {
  std::function<void()> run = with_errors_told(std::move(task.run));
  if (!issuer_) return thread_.run(std::move(run));
  issuer_->run_ordered({.run = std::move(run),
                        .place = task.place,
                        .skipped = [this, step = task.step] { return outcome_.skips(step); },
                        .may_skip_later = task.may_drop,
                        .ends_step = task.ends_step,
                        .phase = task.phase});
}

void Lane::follow(const Lane& other) {
  if (this == &other) return;
  if (!thread_.same_queue(other.thread_)) thread_.wait(Stream(other.thread_).record());
  if (on_host()) return;
  thread_.run(with_errors_told([this, &other] { stream().wait(other.stream().record()); }));
}

std::exception_ptr Lane::try_task(const Work& work, const std::function<void(Stream&)>& task,
                                  Event& enqueued) {
  if (std::exception_ptr refusal = outcome_.refusal(work.step)) return refusal;
  try {
    if (on_host() || work.after.complete()) work.after.wait();  // throws what went wrong there
    Stream on = stream();
    on.wait(work.after);
    task(on);
    if (on_host()) return nullptr;
    enqueued = on.record();
    enqueued.throw_if_failed();
    return nullptr;
  } catch (const StepAbortedError&) {  // thrown by work.after, on every rank
    return std::current_exception();
  } catch (...) {
    if (work.scope == Scope::kAllRanks) outcome_.fail(std::current_exception());
    return std::current_exception();
  }
}

Event Lane::run(const Work& work, std::function<void(Stream&)> task) {
  const auto done = std::make_shared<TaskEvent>(issuer_);
  Work known = work;
  // Waits here, as the issuing thread may be the one that enqueues it.
  if (!on_host()) known.after = work.after.enqueued();
  auto run_it = [this, known = std::move(known), done, task = std::move(task)]() mutable {
    Event enqueued;
    std::exception_ptr error = try_task(known, task, enqueued);
    if (error && !on_host()) enqueued = stream().record();  // its earlier work may still run
    task = {};  // releases what it holds before a waiter goes on
    done->finish(std::move(error), enqueued);
  };
  if (work.scope == Scope::kAllRanks) {
    issue({.run = std::move(run_it), .step = work.step});
  } else {
    thread_.run(with_errors_told(std::move(run_it)));
  }
  return Event(done);
}

}  // namespace hsdp::reducer
