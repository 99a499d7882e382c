#include "bindings/module/log_sink.h"

#include <pthread.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module/bindings.h"
#include "hsdp/log.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

struct KeptLines {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<std::pair<LogLevel, std::string>> lines;
  py::handle writer;  // guarded by the GIL
};

// Never destroyed: threads of the library may still write while the process exits.
KeptLines& kept_lines() {
  static auto* const instance = new KeptLines;
  return *instance;
}

// A child made by fork() must not write its parent's lines, nor find the mutex locked by a thread
// that it does not have.
void drop_lines_in_children() {
  static const int installed =
      ::pthread_atfork([] { kept_lines().mutex.lock(); }, [] { kept_lines().mutex.unlock(); },
                       [] {
                         kept_lines().lines.clear();
                         kept_lines().any = false;
                         kept_lines().mutex.unlock();
                       });
  static_cast<void>(installed);
}

void keep(LogLevel level, std::string line) {
  KeptLines& kept = kept_lines();
  const std::scoped_lock lock(kept.mutex);
  kept.lines.emplace_back(level, std::move(line));
  kept.any = true;
}

}  // namespace

void write_kept_lines() {
  KeptLines& kept = kept_lines();
  if (!kept.any) return;
  std::vector<std::pair<LogLevel, std::string>> lines;
  {
    const std::scoped_lock lock(kept.mutex);
    lines.swap(kept.lines);
    kept.any = false;
  }
  bool ends_program = false;
  for (const auto& [level, line] : lines) {
    try {
      kept.writer(static_cast<int>(level), line);
    } catch (py::error_already_set& error) {
      ends_program = ends_program || !error.matches(PyExc_Exception);
      error.discard_as_unraisable("hsdp.log_sink");
    }
  }
  // Last: Python code that runs before this function returns would raise it, and lose it here.
  if (ends_program) PyErr_SetInterrupt();
}

void bind_log_sink(py::module_& module) {
  drop_lines_in_children();
  module.def(
      "set_log_writer",
      [](const py::function& writer) { kept_lines().writer = py::object(writer).release(); },
      py::arg("writer"), "Sets the function that lines are handed to: writer(level, line).");
  module.def(
      "set_log_level", [](int level) { set_log_sink(keep, level); }, py::arg("level"),
      "Hands lines of at least this level to the writer. Lower ones go to stderr if HSDP_LOG asks "
      "for them.");
  module.def(
      "end_log",
      [] {
        set_log_sink(nullptr, 0);
        write_kept_lines();
      },
      "Hands over the lines that are left. Later ones go to stderr.");
}

}  // namespace hsdp::python
