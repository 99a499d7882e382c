// hsdp._hsdp on the stand-in for the CUDA runtime, with calls by which tests control its GPUs. A
// GPU's memory is the process's, and its streams are threads.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/module/bindings.h"
#include "bindings/module/caller_stream.h"
#include "bindings/module/mesh_handle.h"
#include "cuda_stand_in.h"
#include "device_world.h"
#include "hsdp/device/copy.h"

namespace {

namespace py = pybind11;
using hsdp::Device;
using hsdp::DeviceType;
using hsdp::python::MeshHandle;

constexpr Device kGpu{DeviceType::kCuda, 0};

void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

hsdp::Stream borrow(std::uintptr_t stream) { return hsdp::Stream::borrow(kGpu, pointer(stream)); }

MeshHandle init_mesh(int replicate, int shard, int index) {
  const py::gil_scoped_release released;
  hsdp::MeshOptions options;
  options.replicate = replicate;
  options.shard = shard;
  options.timeout_s = 60;
  const hsdp::Mesh host = hsdp::init_mesh(options);
  options.device = {DeviceType::kCuda, index};
  return MeshHandle(hsdp::Mesh(hsdp::stand_in::on_device(host.world(), options.device), options));
}

std::uintptr_t make_stream() {
  static auto* const streams = new std::vector<hsdp::Stream>;  // never destroyed
  streams->push_back(hsdp::Stream::create(kGpu, "test"));
  return reinterpret_cast<std::uintptr_t>(streams->back().native_handle());
}

void synchronize(std::uintptr_t stream) {
  const py::gil_scoped_release released;
  borrow(stream).synchronize();
}

// `later` continues after the work given to `earlier` so far; both as DLPack names them.
void order(std::uintptr_t later, std::uintptr_t earlier) {
  hsdp::python::stream_of_dlpack(kGpu, later)
      .wait(hsdp::python::stream_of_dlpack(kGpu, earlier).record());
}

void copy(std::uintptr_t stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  hsdp::copy_bytes(pointer(to), pointer(from), bytes, borrow(stream));
}

bool is_done(std::uintptr_t stream) { return borrow(stream).record().complete(); }

// `with Standstill():` no stream makes progress.
class Standstill {
 public:
  void enter() { now_.emplace(); }
  void exit(const py::args& /*error*/) { now_.reset(); }

 private:
  std::optional<hsdp::stand_in::Standstill> now_;
};

void bind_stand_in(py::module_ module) {
  module.def("init_mesh", init_mesh);
  module.def("make_stream", make_stream);
  module.def("synchronize", synchronize);
  module.def("order", order);
  module.def("copy", copy);
  module.def("is_done", is_done);
  module.def("allocated_bytes", hsdp::stand_in::allocated_bytes);
  module.def("fail_allocation_once", [] { hsdp::stand_in::fail_allocation({{.times = 1}}); });
  py::class_<Standstill>(module, "Standstill")
      .def(py::init<>())
      .def("__enter__", &Standstill::enter)
      .def("__exit__", &Standstill::exit);
}

}  // namespace

PYBIND11_MODULE(_hsdp, module) {
  module.attr("__version__") = HSDP_VERSION;
  hsdp::python::bind_parts(module);
  bind_stand_in(module.def_submodule("stand_in"));
}
