// GPU memory from a Python framework's allocator.
#include "hsdp/device/memory_source.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "bindings/module/bindings.h"
#include "bindings/module/held_object.h"
#include "bindings/module/interruptible_call.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

// Only during a call from Python: on a thread of the library, the garbage collector might end a
// Reducer that waits for that very thread. Python's errors must not leave the thread with the GIL.
void call_python(const std::function<void()>& work) {
  if (!in_released_call()) return;
  run_on_calling_thread([&work] {
    try {
      work();
    } catch (const py::error_already_set& error) {
      const std::string text = error.what();                      // may run Python code
      if (!error.matches(PyExc_Exception)) PyErr_SetInterrupt();  // Ctrl-C: for the program
      throw Error("device: " + text.substr(0, text.find('\n')));
    }
  });
}

std::shared_ptr<std::byte> allocate(py::handle function, Device device, std::size_t size,
                                    void* stream) {
  std::shared_ptr<std::byte> memory;
  call_python([&] {
    const py::object made = function(device.index, size, reinterpret_cast<std::uintptr_t>(stream));
    if (made.is_none()) return;
    const auto [address, owner] = made.cast<std::pair<std::uintptr_t, py::object>>();
    auto* const data = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
    memory = {hold(owner), data};
  });
  return memory;
}

}  // namespace

void bind_memory_source(py::module_& module) {
  module.def(
      "set_memory_source",
      [](const py::function& allocates, const py::function& gives_back) {
        // Never released: threads of the library may allocate while the interpreter ends.
        const py::handle make = py::object(allocates).release();
        const py::handle give_back = py::object(gives_back).release();
        set_memory_source(
            {.allocate = [make](Device device, std::size_t size,
                                void* stream) { return allocate(make, device, size, stream); },
             .give_back_unused =
                 [give_back](Device device) { call_python([&] { give_back(device.index); }); }});
      },
      py::arg("allocate"), py::arg("give_back_unused"),
      "Where a GPU's memory comes from: allocate(index, size, stream) -> (address, owner) or None, "
      "and give_back_unused(index) before an allocation is tried once more.");
}

}  // namespace hsdp::python
