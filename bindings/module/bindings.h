// The parts of the extension module, one file each.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/module/memory.h"

namespace hsdp::zero {
class ParameterGather;
}  // namespace hsdp::zero

namespace hsdp::python {

// Of an object of bind_parameter_gather(): may outlive it.
[[nodiscard]] std::shared_ptr<zero::ParameterGather> shared_gather(pybind11::handle gather);

void bind_errors(pybind11::module_& module);
void bind_memory_source(pybind11::module_& module);
void bind_log_sink(pybind11::module_& module);
void bind_mesh(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_gradient_hook(pybind11::module_& module);     // after bind_reducer
void bind_row_reducer(pybind11::module_& module);       // after bind_reducer
void bind_loco_hop(pybind11::module_& module);          // after bind_reducer
void bind_parameter_gather(pybind11::module_& module);  // after bind_reducer
void bind_unit_gather(pybind11::module_& module);       // after bind_parameter_gather
void bind_step_word(pybind11::module_& module);         // after bind_reducer
void bind_snapshot(pybind11::module_& module);
void bind_compare(pybind11::module_& module);
void bind_masters(pybind11::module_& module);

// All of them.
inline void bind_parts(pybind11::module_& module) {
  bind_errors(module);
  bind_memory(module);
  bind_memory_source(module);
  bind_log_sink(module);
  bind_mesh(module);
  bind_communicator(module);
  bind_reducer(module);
  bind_gradient_hook(module);
  bind_row_reducer(module);
  bind_loco_hop(module);
  bind_parameter_gather(module);
  bind_unit_gather(module);
  bind_step_word(module);
  bind_snapshot(module);
  bind_compare(module);
  bind_masters(module);
}

}  // namespace hsdp::python
