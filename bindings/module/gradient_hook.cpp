// Hooks of an attached model's parameters, and its loops over them, without the interpreter.
//
// A hook reads p.grad, inspects it through DLPack's functions for arrays of its class, and hands it
// over. What it does not recognize it leaves to the Python implementation, which takes more kinds
// of gradients and rejects the others with a suitable error [Note: p.grad is taken out]. This code
// knows torch only by the names of its attributes. Needs the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/module/bindings.h"
#include "bindings/module/dlpack_abi.h"
#include "bindings/module/reducer_handle.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

PyObject* grad_name() {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  return name;
}

py::object gradient_in(py::handle parameter) {
  auto grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(parameter.ptr(), grad_name()));
  if (!grad) throw py::error_already_set();
  return grad;
}

// Gradients that a window leaves in p.grad, where autograd adds them up.
class HeldGradients {
 public:
  // From now on, a gradient stays in place until it is the sum of `backwards` passes.
  void begin(std::optional<std::int64_t> backwards) {
    is_active_ = true;
    backwards_ = backwards;
    passes_.clear();
  }
  // Counts one gradient of that parameter; returns whether it stays in p.grad.
  [[nodiscard]] bool keeps(int parameter) {
    if (!is_active_) return false;
    const auto place = static_cast<std::size_t>(parameter);
    if (passes_.size() <= place) passes_.resize(place + 1);
    ++passes_[place];
    return !backwards_ || passes_[place] < *backwards_;
  }
  // From now on, gradients are handed over again.
  void end() { is_active_ = false; }
  [[nodiscard]] bool is_active() const { return is_active_; }
  // The largest number of passes of one parameter in the last window.
  [[nodiscard]] std::int64_t pass_count() const {
    return passes_.empty() ? 1 : *std::ranges::max_element(passes_);
  }

 private:
  bool is_active_ = false;
  std::optional<std::int64_t> backwards_;
  std::vector<std::int64_t> passes_;  // [parameter]
};

// How to inspect arrays of exactly one class.
struct ArrayClass {
  PyTypeObject* type = nullptr;  // null: the class has no such functions
  decltype(dlpack::ExchangeApi::describe) describe = nullptr;
  dlpack::CurrentStream current_stream = nullptr;
  py::object is_neg;  // the method: negation is only a mark, which memory does not show
};

ArrayClass array_class(const py::type& type) {
  const py::object capsule = py::getattr(type, dlpack::kExchangeApiAttribute, py::none());
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeApiName) == 0) return {};
  const auto* const api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeApiName));
  if (api->version.major != dlpack::kVersion.major || api->describe == nullptr) return {};
  return {reinterpret_cast<PyTypeObject*>(type.ptr()), api->describe, api->current_stream,
          type.attr("is_neg")};
}

// Sets the same Python error as pybind11.
void set_python_error(const std::exception_ptr& error) {
  const py::cpp_function thrower([error] { std::rethrow_exception(error); });
  Py_XDECREF(PyObject_CallNoArgs(thrower.ptr()));
}

class GradientHook {
 public:
  GradientHook(py::object reducer, int index, std::shared_ptr<HeldGradients> held,
               py::object python_way, py::object explained, const py::type& tensor)
      : reducer_(std::move(reducer)),
        handle_(reducer_.cast<ReducerHandle&>()),
        index_(index),
        held_(std::move(held)),
        python_way_(std::move(python_way)),
        explained_(std::move(explained)) {
    const ParameterSpec& spec = handle_.reducer().parameters().at(static_cast<std::size_t>(index));
    if (!spec.is_complex) tensors_ = array_class(tensor);
    shape_ = spec.shape;
    element_type_ = dlpack::element_type(spec.dtype);
    device_ = dlpack::device_id(handle_.caller().device());
  }

  void run(py::handle parameter) {
    py::object grad = gradient_in(parameter);
    if (grad.is_none() || held_->keeps(index_)) return;
    StridedView view;
    if (!understands(grad.ptr(), view)) {
      python_way_(parameter);
      return;
    }
    if (PyObject_SetAttr(parameter.ptr(), grad_name(), Py_None) != 0) {
      throw py::error_already_set();
    }
    try {
      handle_.gradient_of(index_, std::move(view), std::move(grad), tensors_.current_stream);
    } catch (const UsageError&) {
      set_python_error(std::current_exception());
      const py::object error = explained_(py::error_already_set().value());
      PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
      throw py::error_already_set();
    }
  }

 private:
  // Whether it is as registered; then `view` has its memory and strides.
  [[nodiscard]] bool understands(PyObject* grad, StridedView& view) const {
    if (Py_TYPE(grad) != tensors_.type) return false;
    dlpack::Tensor tensor;
    if (tensors_.describe(grad, &tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    const auto dimensions = static_cast<std::size_t>(tensor.dimension_count);
    if (tensor.type != element_type_ || tensor.device != device_ || dimensions != shape_.size() ||
        !std::equal(shape_.begin(), shape_.end(), tensor.shape)) {
      return false;
    }
    const auto mark =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(tensors_.is_neg.ptr(), grad));
    if (!mark) throw py::error_already_set();
    if (mark.ptr() != Py_False) return false;
    view.data = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
    if (!is_row_major(tensor)) view.strides.assign(tensor.strides, tensor.strides + dimensions);
    return true;
  }

  static bool is_row_major(const dlpack::Tensor& tensor) {
    if (tensor.strides == nullptr) return true;
    std::int64_t stride = 1;
    for (std::int32_t i = tensor.dimension_count; i-- > 0;) {
      if (tensor.shape[i] == 0) return true;
      if (tensor.shape[i] > 1 && tensor.strides[i] != stride) return false;
      stride *= tensor.shape[i];
    }
    return true;
  }

  const py::object reducer_;
  ReducerHandle& handle_;
  const int index_;
  const std::shared_ptr<HeldGradients> held_;
  const py::object python_way_;
  const py::object explained_;
  ArrayClass tensors_;
  Shape shape_;
  dlpack::ElementType element_type_{};
  dlpack::DeviceId device_{};
};

PyObject* run_hook(PyObject* capsule, PyObject* parameter) {
  try {
    static_cast<GradientHook*>(PyCapsule_GetPointer(capsule, nullptr))->run(parameter);
    Py_RETURN_NONE;
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

// A plain C function: pybind11 would inspect the arguments of each call.
py::object gradient_hook(py::object reducer, int index, std::shared_ptr<HeldGradients> held,
                         py::object python_way, py::object explained, const py::type& tensor) {
  static PyMethodDef definition = {"gradient_hook", run_hook, METH_O, nullptr};
  auto hook = std::make_unique<GradientHook>(std::move(reducer), index, std::move(held),
                                             std::move(python_way), std::move(explained), tensor);
  const py::capsule owner(hook.release(),
                          [](void* object) { delete static_cast<GradientHook*>(object); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, owner.ptr()));
}

py::list names_with_gradient(const py::dict& parameters) {
  py::list names;
  for (const auto& [name, parameter] : parameters) {
    if (!gradient_in(parameter).is_none()) names.append(name);
  }
  return names;
}

}  // namespace

void bind_gradient_hook(py::module_& module) {
  py::class_<HeldGradients, std::shared_ptr<HeldGradients>>(module, "HeldGradients")
      .def(py::init<>())
      .def("begin", &HeldGradients::begin)
      .def("end", &HeldGradients::end)
      .def_property_readonly("active", &HeldGradients::is_active)
      .def_property_readonly("pass_count", &HeldGradients::pass_count);
  module.def("gradient_hook", gradient_hook);
  module.def("names_with_gradient", names_with_gradient);
}

}  // namespace hsdp::python
