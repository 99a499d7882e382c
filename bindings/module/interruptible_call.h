// Calls that may wait, with the GIL released and Ctrl-C working [Note: Ctrl-C in a wait].
//
// Python runs signal handlers on its main thread only. So when a call comes from there, another
// thread runs it, and the main thread looks for signals ten times a second. A handler that raises
// ends the call: `interrupt` must make the task return soon (it ends the world on every rank), and
// the handler's exception is raised. Calls from other threads run where they are.
//
// A task that does not return within seconds after that is left behind: so it owns, by value or by
// shared pointer, everything that it touches.
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

// For tasks that wait for nobody: here and now, with the GIL released.
void run_released(std::function<void()> task);

// Whether the calling thread runs such a task.
[[nodiscard]] bool in_released_call();

// From such a task: runs `work` with the GIL, on the thread that made the Python call. Rethrows
// what it throws; an Error when that call has been interrupted meanwhile.
void run_on_calling_thread(const std::function<void()>& work);

// `run` of a task with a result.
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
