#include "bindings/module/memory.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "bindings/module/array_argument.h"
#include "bindings/module/dlpack_abi.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

// One export: the protocol's struct, what it points to, and its owner.
template <typename Managed>
struct Export {
  Managed managed{};
  Shape shape;
  Shape strides;
  std::shared_ptr<const void> owner;
};

template <typename Managed>
void delete_export(Managed* managed) {
  delete static_cast<Export<Managed>*>(managed->context);
}

template <typename Managed>
Managed* make_export(const Memory& memory, std::shared_ptr<const void> owner) {
  auto* exported = new Export<Managed>;
  exported->shape = memory.shape();
  exported->strides.resize(exported->shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = exported->shape.size(); i-- > 0;) {
    exported->strides[i] = stride;
    stride *= exported->shape[i];
  }
  exported->owner = std::move(owner);
  exported->managed.context = exported;
  exported->managed.deleter = delete_export<Managed>;
  const TensorView& view = memory.view();
  exported->managed.tensor = {view.data,
                              dlpack::device_id(view.device),
                              static_cast<std::int32_t>(exported->shape.size()),
                              dlpack::element_type(view.dtype),
                              exported->shape.data(),
                              exported->strides.data(),
                              0};
  return &exported->managed;
}

// Runs only if no consumer took the export out of the capsule.
template <typename Managed>
void delete_capsule(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

py::capsule as_capsule(void* pointer, const char* name, PyCapsule_Destructor destructor) {
  PyObject* const capsule = PyCapsule_New(pointer, name, destructor);
  if (capsule == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace

Memory::Memory(TensorView view, Shape shape, std::shared_ptr<const void> owner, Event ready)
    : view_(view), shape_(std::move(shape)), owner_(std::move(owner)), ready_(std::move(ready)) {}

Memory Memory::create(std::int64_t count, Dtype dtype, const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) return zeros(count, dtype);
  const std::size_t size = static_cast<std::size_t>(count) * size_bytes(dtype);
  auto scratch = std::make_shared<Scratch>(size, stream);
  return {{scratch->data(), count, dtype, stream.device()}, {count}, scratch};
}

Memory Memory::zeros(std::int64_t count, Dtype dtype) {
  auto buffer =
      std::make_shared<Buffer>(Device{}, static_cast<std::size_t>(count) * size_bytes(dtype));
  return {{buffer->data(), count, dtype, {}}, {count}, buffer};
}

py::object Memory::numpy() const {
  if (view_.device.type != DeviceType::kHost) {
    throw UsageError({.where = "array",
                      .expected = "host memory for NumPy",
                      .got = to_string(view_.device),
                      .remedy = "take it by DLPack"});
  }
  auto owner = std::make_unique<std::shared_ptr<const void>>(owner_);
  const py::capsule base(owner.get(), [](void* pointer) {
    delete static_cast<std::shared_ptr<const void>*>(pointer);
  });
  static_cast<void>(owner.release());
  const auto dtype = numpy_dtype(view_.dtype).cast<py::dtype>();
  // An empty view may have no address, which NumPy would take as a request to allocate.
  static std::max_align_t nothing;
  const void* const data = view_.data == nullptr ? &nothing : view_.data;
  return py::array(dtype, std::vector<py::ssize_t>(shape_.begin(), shape_.end()), data, base);
}

double Memory::number() const {
  double value = 0.0;
  const py::gil_scoped_release released;
  // Copy only when nothing is left to wait for: a copy blocks the host, even if the world ends.
  if (auto engine = world_.lock()) {
    Communicator(std::move(engine)).wait(ready_);
  } else {
    ready_.wait();
  }
  Stream stream = Stream::borrow(view_.device, nullptr);
  copy_bytes(&value, view_.data, sizeof(value), stream);
  stream.synchronize();
  return value;
}

py::capsule Memory::dlpack(bool versioned, std::optional<std::int64_t> stream) const {
  constexpr std::int64_t kNoOrder = -1;
  if (view_.device.type != DeviceType::kHost && stream != kNoOrder) {
    const auto handle = static_cast<std::uintptr_t>(stream.value_or(0));
    stream_of_dlpack(view_.device, handle).wait(ready_);
  }
  if (versioned) {
    auto* managed = make_export<dlpack::VersionedTensor>(*this, owner_);
    managed->version = dlpack::kVersion;
    return as_capsule(managed, dlpack::kVersionedName, [](PyObject* capsule) {
      delete_capsule<dlpack::VersionedTensor>(capsule, dlpack::kVersionedName);
    });
  }
  auto* managed = make_export<dlpack::ManagedTensor>(*this, owner_);
  return as_capsule(managed, dlpack::kName, [](PyObject* capsule) {
    delete_capsule<dlpack::ManagedTensor>(capsule, dlpack::kName);
  });
}

py::tuple Memory::dlpack_device() const {
  const dlpack::DeviceId device = dlpack::device_id(view_.device);
  return py::make_tuple(static_cast<int>(device.kind), device.index);
}

void bind_memory(py::module_& module) {
  py::class_<Memory>(module, "Memory")
      .def_property_readonly("shape",
                             [](const Memory& self) { return py::tuple(py::cast(self.shape())); })
      .def_property_readonly("count", [](const Memory& self) { return self.view().count; })
      .def_property_readonly(
          "dtype", [](const Memory& self) { return std::string(name(self.view().dtype)); })
      .def_property_readonly("device",
                             [](const Memory& self) { return to_string(self.view().device); })
      .def_property_readonly(
          "pointer",
          [](const Memory& self) { return reinterpret_cast<std::uintptr_t>(self.view().data); })
      .def("numpy", &Memory::numpy)
      .def("number", &Memory::number)
      .def("dlpack", &Memory::dlpack, py::arg("versioned"), py::arg("stream") = py::none())
      .def("dlpack_device", &Memory::dlpack_device);
}

}  // namespace hsdp::python
