#include "bindings/module/array_argument.h"

#include <pybind11/numpy.h>

#include <optional>
#include <string>

#include "bindings/module/memory.h"
#include "bindings/module/text_argument.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

constexpr const char* kAccepted =
    "a NumPy array, an array with __dlpack__ (torch, JAX, CuPy), an hsdp.Array or a buffer";

// NumPy's type number of ml_dtypes.bfloat16, once anyone has imported that package; otherwise -1.
int bf16_number() {
  static int number = -1;
  if (number >= 0) return number;
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("ml_dtypes")) return -1;
  const auto dtype = py::dtype::from_args(modules["ml_dtypes"].attr("bfloat16"));
  number = py::detail::array_descriptor_proxy(dtype.ptr())->type_num;
  return number;
}

bool is_complex(int number) {
  using Api = py::detail::npy_api;
  return number == Api::NPY_CFLOAT_ || number == Api::NPY_CDOUBLE_;
}

// For complex numbers, the dtype of their parts.
std::optional<Dtype> dtype_of_number(int number) {
  using Api = py::detail::npy_api;
  switch (number) {
    case Api::NPY_FLOAT_:
    case Api::NPY_CFLOAT_:
      return Dtype::kF32;
    case Api::NPY_DOUBLE_:
    case Api::NPY_CDOUBLE_:
      return Dtype::kF64;
    case Api::NPY_LONG_:
    case Api::NPY_LONGLONG_:
      return Dtype::kI64;
    case Api::NPY_UBYTE_:
      return Dtype::kU8;
    case 23:  // half precision
      return Dtype::kF16;
    default:
      break;
  }
  if (number == bf16_number() && number >= 0) return Dtype::kBf16;
  return std::nullopt;
}

ArrayArgument from_numpy(const py::array& array, std::string_view what, Complex of_complex) {
  ArrayArgument result;
  const auto* descriptor = py::detail::array_descriptor_proxy(array.dtype().ptr());
  const std::optional<Dtype> dtype = dtype_of_number(descriptor->type_num);
  const bool has_parts = is_complex(descriptor->type_num);
  if (has_parts && of_complex == Complex::kRefused) {
    refuse_complex(what, py::str(array.dtype()));
  }
  if (!dtype || descriptor->byteorder == '>') {
    refuse(what, "dtype float32, bfloat16 (ml_dtypes), float16, float64, int64 or uint8",
           std::string(py::str(array.dtype())), "convert it with astype");
  }
  result.view.dtype = *dtype;
  const auto item_bytes = array.itemsize();
  constexpr int kAligned = 0x0100;
  const int flags = array.flags();
  if ((flags & kAligned) == 0) {
    refuse(what, "memory aligned to its elements", "an unaligned array", "pass a copy of it");
  }
  result.view.data = array.data();
  result.writable = array.writeable();
  const auto dimensions = static_cast<std::size_t>(array.ndim());
  result.view.shape.assign(array.shape(), array.shape() + dimensions);
  if ((flags & py::array::c_style) == 0) {
    for (std::size_t i = 0; i < dimensions; ++i) {
      const py::ssize_t stride = array.strides(static_cast<py::ssize_t>(i));
      if (stride % item_bytes != 0) {
        refuse(what, "strides of whole elements", "others", "pass numpy.ascontiguousarray(x)");
      }
      result.view.strides.push_back(stride / item_bytes);
    }
  }
  if (has_parts) view_as_real(result.view);
  result.owner = array;
  return result;
}

ArrayArgument from_memory(const Memory& memory, py::handle owner, CallerStream& caller) {
  ArrayArgument result;
  if (!caller.on_host()) caller.now().wait(memory.ready());
  const TensorView& view = memory.view();
  result.view = {view.data, view.dtype, view.device, memory.shape(), {}};
  result.owner = py::reinterpret_borrow<py::object>(owner);
  return result;
}

}  // namespace

namespace {

ArrayArgument any_array(py::handle object, std::string_view what, CallerStream& caller,
                        Complex of_complex) {
  if (py::isinstance<py::array>(object)) {
    return from_numpy(py::reinterpret_borrow<py::array>(object), what, of_complex);
  }
  if (py::isinstance<Memory>(object)) {
    return from_memory(object.cast<const Memory&>(), object, caller);
  }
  if (py::hasattr(object, "_hsdp_memory")) {
    const py::object memory = object.attr("_hsdp_memory");
    return from_memory(memory.cast<const Memory&>(), memory, caller);
  }
  if (py::hasattr(object, "__dlpack__") && !py::isinstance<py::type>(object)) {
    return from_dlpack(object, what, caller, of_complex);
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    const py::array array = py::module_::import("numpy").attr("asarray")(object);
    ArrayArgument result = from_numpy(array, what, of_complex);
    result.writable = result.writable && !array.owndata();  // a NumPy scalar became a copy
    return result;
  }
  refuse(what, kAccepted, "an object of type " + type_name(object));
}

}  // namespace

void refuse(std::string_view what, const std::string& expected, const std::string& got,
            const std::string& remedy) {
  throw UsageError(
      {.where = std::string(what), .expected = expected, .got = got, .remedy = remedy});
}

void require_device(Device device, std::string_view what, const CallerStream& caller) {
  if (device == caller.device()) return;
  if (!caller.of_mesh()) refuse(what, "host memory", to_string(device), "copy it there first");
  refuse(what, "memory on " + to_string(caller.device()) + ", the mesh's device", to_string(device),
         "move it there, or make the mesh with its device");
}

void refuse_complex(std::string_view what, const std::string& dtype) {
  refuse(what, "real numbers", "an array of " + dtype,
         "register the parameter with that dtype, or pass the array's real view");
}

void view_as_real(StridedView& view) {
  view.shape.push_back(2);
  if (view.strides.empty()) return;
  for (std::int64_t& stride : view.strides) stride *= 2;
  view.strides.push_back(1);
}

ArrayArgument array_argument(py::handle object, std::string_view what, CallerStream& caller,
                             Complex of_complex) {
  ArrayArgument result = any_array(object, what, caller, of_complex);
  require_device(result.view.device, what, caller);
  return result;
}

ArrayArgument host_array_argument(py::handle object, std::string_view what) {
  CallerStream host;
  return array_argument(object, what, host);
}

ConstTensorView contiguous(const ArrayArgument& argument, std::string_view what) {
  if (!argument.view.is_contiguous()) {
    refuse(what, "a contiguous array",
           "one of shape " + to_string(argument.view.shape) + " with strides " +
               to_string(argument.view.strides),
           "pass numpy.ascontiguousarray(x) or x.contiguous()");
  }
  return {argument.view.data, argument.view.count(), argument.view.dtype, argument.view.device};
}

TensorView writable(const ArrayArgument& argument, std::string_view what) {
  const ConstTensorView view = contiguous(argument, what);
  if (!argument.writable) {
    refuse(what, "a writable array",
           "a read-only one, or one that does not say by DLPack that it may be written to",
           "pass a copy");
  }
  return {const_cast<void*>(view.data), view.count, view.dtype, view.device};  // NOLINT
}

py::object numpy_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return py::dtype("float32");
    case Dtype::kF16:
      return py::dtype("float16");
    case Dtype::kF64:
      return py::dtype("float64");
    case Dtype::kI64:
      return py::dtype("int64");
    case Dtype::kU8:
      return py::dtype("uint8");
    case Dtype::kBf16:
      break;
  }
  try {
    return py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16"));
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
  }
  throw UsageError({.where = "array: bfloat16 for NumPy, which has none of its own",
                    .expected = "the package ml_dtypes",
                    .got = "none",
                    .remedy = "install it, or take the array by DLPack"});
}

}  // namespace hsdp::python
