#include <optional>
#include <string>

#include "bindings/module/array_argument.h"
#include "bindings/module/dlpack_abi.h"
#include "bindings/module/text_argument.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using dlpack::DeviceKind;
using dlpack::TypeCode;

std::string type_text(dlpack::ElementType type) {
  static constexpr const char* kNames[] = {"int",    "uint",    "float", "handle",
                                           "bfloat", "complex", "bool"};
  const auto code = static_cast<std::size_t>(type.code);
  return (code < std::size(kNames) ? kNames[code] : "type " + std::to_string(code)) +
         std::to_string(type.bits) +
         (type.lanes == 1 ? "" : " in vectors of " + std::to_string(type.lanes));
}

bool is_complex(dlpack::ElementType type) { return type.code == TypeCode::kComplex; }

// For complex numbers, the dtype of their parts.
Dtype dtype_of(dlpack::ElementType type, std::string_view what, Complex of_complex) {
  if (type.lanes == 1) {
    if (is_complex(type)) {
      if (of_complex == Complex::kRefused) refuse_complex(what, type_text(type));
      if (type.bits == 64) return Dtype::kF32;
      if (type.bits == 128) return Dtype::kF64;
    }
    if (type.code == TypeCode::kFloat && type.bits == 32) return Dtype::kF32;
    if (type.code == TypeCode::kFloat && type.bits == 16) return Dtype::kF16;
    if (type.code == TypeCode::kFloat && type.bits == 64) return Dtype::kF64;
    if (type.code == TypeCode::kBfloat && type.bits == 16) return Dtype::kBf16;
    if (type.code == TypeCode::kInt && type.bits == 64) return Dtype::kI64;
    if (type.code == TypeCode::kUInt && type.bits == 8) return Dtype::kU8;
  }
  refuse(what, "dtype float32, bfloat16, float16, float64, int64 or uint8", type_text(type),
         "convert it first");
}

// The only place that decides which devices' memory the library accepts.
Device device_of(dlpack::DeviceId device, std::string_view what) {
  switch (device.kind) {
    case DeviceKind::kCpu:
    case DeviceKind::kCudaHost:
      return {};
    case DeviceKind::kCuda:
    case DeviceKind::kCudaManaged:
      return {DeviceType::kCuda, device.index};
  }
  refuse(what, "memory of the host or of a CUDA device",
         "memory of DLPack device type " + std::to_string(static_cast<int>(device.kind)),
         "copy it to the host first");
}

// The device that the producer announces before exporting; nothing from old producers.
std::optional<Device> announced_device(py::handle object, std::string_view what) {
  if (!py::hasattr(object, "__dlpack_device__")) return std::nullopt;
  const py::tuple device = object.attr("__dlpack_device__")();
  return device_of({static_cast<DeviceKind>(device[0].cast<int>()), device[1].cast<int>()}, what);
}

// Versioned capsules say whether the memory is read-only; older producers do not know max_version.
py::object export_capsule(py::handle object, const py::dict& arguments) {
  const py::object dlpack = object.attr("__dlpack__");
  try {
    py::dict versioned = py::reinterpret_steal<py::dict>(PyDict_Copy(arguments.ptr()));
    versioned["max_version"] = py::make_tuple(dlpack::kVersion.major, dlpack::kVersion.minor);
    return dlpack(**versioned);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return dlpack(**arguments);
}

// On a GPU the producer makes the caller's stream wait for its own.
py::object export_capsule(py::handle object, std::string_view what, CallerStream& caller) {
  try {
    py::dict arguments;
    const std::optional<Device> device = announced_device(object, what);
    if (device && device->type == DeviceType::kCuda) {
      require_device(*device, what, caller);
      arguments["stream"] = dlpack_stream(caller.now());
    }
    return export_capsule(object, arguments);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt and similar
    const std::string reason = py::str(error.value());
    refuse(what, "an array that can be exported by DLPack",
           "a " + type_name(object) + " that refuses (" + reason + ")",
           "detach it, or convert it to a plain array first");
  }
}

// torch only marks some tensors as negated or conjugated, which memory does not show.
void require_unmarked(py::handle object, std::string_view what) {
  const auto is_marked = [object](const char* mark) {
    return py::hasattr(object, mark) && object.attr(mark)().cast<bool>();
  };
  const bool is_conjugated = is_marked("is_conj");
  if (!is_conjugated && !is_marked("is_neg")) return;
  refuse(what, "an array whose memory holds its values",
         "a " + type_name(object) + " that is " + (is_conjugated ? "conjugated" : "negated") +
             " by a mark",
         is_conjugated ? "pass x.resolve_conj()" : "pass x.resolve_neg()");
}

struct Capsule {
  const dlpack::Tensor* tensor = nullptr;
  std::optional<bool> read_only;  // known only for versioned capsules
};

Capsule open_capsule(const py::object& capsule, std::string_view what) {
  PyObject* const object = capsule.ptr();
  if (PyCapsule_IsValid(object, dlpack::kVersionedName) != 0) {
    const auto* managed = static_cast<const dlpack::VersionedTensor*>(
        PyCapsule_GetPointer(object, dlpack::kVersionedName));
    if (managed->version.major != dlpack::kVersion.major) {
      refuse(what, "DLPack of version 1", "version " + std::to_string(managed->version.major));
    }
    return {&managed->tensor, (managed->flags & dlpack::kReadOnlyFlag) != 0};
  }
  if (PyCapsule_IsValid(object, dlpack::kName) != 0) {
    return {&static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(object, dlpack::kName))
                 ->tensor,
            std::nullopt};
  }
  refuse(what, "a DLPack capsule from __dlpack__", "something else");
}

// What an array says besides DLPack. Without that it is unknown: JAX exports its immutable arrays
// without a version.
bool says_writable(py::handle object, Device device) {
  const char* const name =
      device.type == DeviceType::kCuda ? "__cuda_array_interface__" : "__array_interface__";
  if (!py::hasattr(object, name)) return false;
  const py::dict interface = object.attr(name);
  if (!interface.contains("data")) return false;
  const py::tuple data = interface["data"];
  return !data[1].cast<bool>();
}

}  // namespace

// The capsule stays unconsumed; its own destructor frees the export [Note: the capsule is kept].
ArrayArgument from_dlpack(py::handle object, std::string_view what, CallerStream& caller,
                          Complex of_complex) {
  require_unmarked(object, what);
  ArrayArgument result;
  result.owner = export_capsule(object, what, caller);
  const Capsule capsule = open_capsule(result.owner, what);
  const dlpack::Tensor& tensor = *capsule.tensor;
  StridedView& view = result.view;
  view.dtype = dtype_of(tensor.type, what, of_complex);
  view.device = device_of(tensor.device, what);
  view.data = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
  const auto dimensions = static_cast<std::size_t>(tensor.dimension_count);
  view.shape.assign(tensor.shape, tensor.shape + dimensions);
  if (tensor.strides != nullptr) {
    view.strides.assign(tensor.strides, tensor.strides + dimensions);
    if (view.is_contiguous()) view.strides.clear();
  }
  if (is_complex(tensor.type)) view_as_real(view);
  result.writable = capsule.read_only ? !*capsule.read_only : says_writable(object, view.device);
  return result;
}

}  // namespace hsdp::python
