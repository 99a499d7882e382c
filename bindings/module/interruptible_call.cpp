#include "bindings/module/interruptible_call.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "bindings/module/held_object.h"
#include "bindings/module/log_sink.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using Lock = std::unique_lock<std::mutex>;

constexpr std::chrono::milliseconds kLook{100};
constexpr std::chrono::seconds kReturnsWithin{10};

struct Call {
  std::function<void()> task;
  std::exception_ptr error;
  bool done = false;
  const std::function<void()>* work = nullptr;  // what the task wants done on the main thread
  std::exception_ptr work_error;
  bool interrupted = false;  // no more work is done
};

// Shared by the main thread and one calling thread. The thread holds its own share, so that it may
// outlive everything else.
struct Post {
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Call> call;
  bool retired = false;
};

// The call whose task this thread runs.
struct Serving {
  Post* post = nullptr;
  Call* call = nullptr;
};
thread_local Serving serving;
thread_local bool in_task_here = false;  // in run_released

struct TaskHere {
  TaskHere() : outer(std::exchange(in_task_here, true)) {}
  ~TaskHere() { in_task_here = outer; }
  TaskHere(const TaskHere&) = delete;
  TaskHere& operator=(const TaskHere&) = delete;
  bool outer;
};

void serve(const std::shared_ptr<Post>& post) {
  pthread_setname_np(pthread_self(), "hsdp-call");
  Lock lock(post->mutex);
  while (true) {
    post->changed.wait(lock, [&] { return post->call || post->retired; });
    if (!post->call) return;
    const std::shared_ptr<Call> call = post->call;
    lock.unlock();
    serving = {post.get(), call.get()};
    try {
      call->task();
    } catch (...) {
      call->error = std::current_exception();
    }
    call->task = nullptr;
    lock.lock();
    call->done = true;
    if (post->call == call) post->call = nullptr;
    post->changed.notify_all();
  }
}

std::shared_ptr<Post> start_thread() {
  auto post = std::make_shared<Post>();
  const AllSignalsBlocked blocked;
  std::thread([post] { serve(post); }).detach();
  return post;
}

// Used by the main thread only; guarded by the GIL.
struct MainCalls {
  std::shared_ptr<Post> post;
  std::uint32_t generation = 0;
  bool busy = false;  // a signal handler may call us during a call
};

MainCalls& main_calls() {
  static auto* const calls = new MainCalls;
  return *calls;
}

bool is_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

enum class Found : std::uint8_t { kDone, kWork, kNothing };

Found look(Post& post, const Call& call, std::chrono::milliseconds limit) {
  const py::gil_scoped_release released;
  Lock lock(post.mutex);
  post.changed.wait_for(lock, limit, [&] { return call.done || call.work != nullptr; });
  if (call.done) return Found::kDone;
  return call.work != nullptr ? Found::kWork : Found::kNothing;
}

void do_work(Post& post, Call& call) {
  try {
    (*call.work)();
  } catch (...) {
    call.work_error = std::current_exception();
  }
  const std::scoped_lock lock(post.mutex);
  call.work = nullptr;
  post.changed.notify_all();
}

void refuse_work(Post& post, Call& call) {
  const std::scoped_lock lock(post.mutex);
  call.interrupted = true;
  call.work = nullptr;
  post.changed.notify_all();
}

// Waits for the call. If a signal handler raises meanwhile, ends the call and throws that error.
void attend(MainCalls& calls, Call& call, const Interrupt& interrupt) {
  const std::shared_ptr<Post> post = calls.post;
  while (true) {
    const Found found = look(*post, call, kLook);
    if (found == Found::kDone) return;
    if (found == Found::kWork) {
      do_work(*post, call);
      continue;
    }
    if (PyErr_CheckSignals() == 0) continue;
    const py::error_already_set raised;
    refuse_work(*post, call);
    if (interrupt) {
      const py::gil_scoped_release released;
      interrupt("it was interrupted by a signal");
    }
    if (!interrupt || look(*post, call, kReturnsWithin) != Found::kDone) {
      const std::scoped_lock lock(post->mutex);
      post->retired = true;
      calls.post = nullptr;
    }
    throw raised;
  }
}

}  // namespace

void run_released(std::function<void()> task) {
  {
    const py::gil_scoped_release released;
    const TaskHere here;
    task();
    task = nullptr;
  }
  release_held();
  write_kept_lines();
}

bool in_released_call() { return serving.call != nullptr || in_task_here; }

void run_on_calling_thread(const std::function<void()>& work) {
  if (serving.call == nullptr) {
    const py::gil_scoped_acquire acquired;
    return work();
  }
  Call& call = *serving.call;
  Lock lock(serving.post->mutex);
  if (!call.interrupted) {
    call.work = &work;
    serving.post->changed.notify_all();
    serving.post->changed.wait(lock, [&] { return call.work == nullptr; });
  }
  if (call.interrupted) throw Error("hsdp: the call was interrupted by a signal");
  if (call.work_error) std::rethrow_exception(std::exchange(call.work_error, nullptr));
}

void run_interruptibly(std::function<void()> task, const Interrupt& interrupt) {
  MainCalls& calls = main_calls();
  if (calls.busy || !is_main_thread()) {
    run_released(std::move(task));
    return;
  }
  if (!calls.post || calls.generation != comm::fork_generation()) {
    calls.post = start_thread();
    calls.generation = comm::fork_generation();
  }
  const auto call = std::make_shared<Call>();
  call->task = std::move(task);
  {
    const std::scoped_lock lock(calls.post->mutex);
    calls.post->call = call;
  }
  calls.post->changed.notify_all();
  calls.busy = true;
  try {
    attend(calls, *call, interrupt);
  } catch (...) {
    calls.busy = false;
    throw;
  }
  calls.busy = false;
  release_held();
  write_kept_lines();
  if (call->error) std::rethrow_exception(std::exchange(call->error, nullptr));
}

}  // namespace hsdp::python
