// Calls that may wait, with the GIL released and Ctrl-C working [Note: Ctrl-C in a wait].
//
// Python runs signal handlers only on its main thread. So a call from there runs on another thread,
// while the main thread checks for signals ten times a second. A handler that raises ends the call:
// `interrupt` must make the task return soon (it ends the world on every rank), and the handler's
// exception is raised. Calls from other threads run directly.
//
// A task that does not return within seconds after that is abandoned, so it must own everything it
// touches, by value or by shared pointer.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace hsdp::python {

using Interrupt = std::function<void(const std::string& reason)>;

// Needs the GIL; rethrows what the task throws.
void run_interruptibly(std::function<void()> task, const Interrupt& interrupt = {});

// Runs a task that never waits for other ranks directly, with the GIL released.
void run_released(std::function<void()> task);

// Whether the calling thread runs such a task.
[[nodiscard]] bool in_released_call();

// Called from such a task: runs `work` with the GIL on the thread that made the Python call.
// Rethrows what it throws; throws Error if that call has been interrupted.
void run_on_calling_thread(const std::function<void()>& work);

// `run`, for a task with a result.
template <typename Task, typename Run>
auto result_of(Task task, Run run) {
  using Result = std::invoke_result_t<Task&>;
  if constexpr (std::is_void_v<Result>) {
    run(std::function<void()>(std::move(task)));
  } else {
    auto result = std::make_shared<std::optional<Result>>();
    run([task = std::move(task), result]() mutable { result->emplace(task()); });
    return std::move(**result);
  }
}

template <typename Task>
auto call_interruptibly(Task task, const Interrupt& interrupt = {}) {
  return result_of(std::move(task), [&interrupt](std::function<void()> call) {
    run_interruptibly(std::move(call), interrupt);
  });
}

template <typename Task>
auto call_released(Task task) {
  return result_of(std::move(task),
                   [](std::function<void()> call) { run_released(std::move(call)); });
}

}  // namespace hsdp::python
