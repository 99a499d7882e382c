// Masters of 16-bit parameters: what they are rounded to, and digests by which changes are noticed.
#include <algorithm>
#include <cstdint>

#include "bindings/module/array_argument.h"
#include "bindings/module/bindings.h"
#include "bindings/module/interruptible_call.h"
#include "bindings/module/mesh_handle.h"
#include "hsdp/kernels/digest.h"
#include "zero/stored_slice.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

// Arrays in host memory, or on the device of a mesh, where work is only enqueued on the caller's
// stream.
class Arrays {
 public:
  explicit Arrays(const MeshHandle* mesh) : caller_(mesh == nullptr ? host_ : *mesh->caller()) {}

  TensorView view(py::handle array, const char* what) {
    return writable(array_argument(array, what, caller_), what);
  }
  template <typename Task>
  void run(Task task) {
    call_released([task, stream = caller_.now()]() mutable {
      stream.run([&] {
        Stream inside = stream.inside_task();
        task(inside);
      });
    });
  }

 private:
  CallerStream host_;
  CallerStream& caller_;
};

// *sum += the digest of `values`.
void add_digest(const MeshHandle* mesh, py::handle values, py::handle sum) {
  Arrays arrays(mesh);
  const TensorView view = arrays.view(values, "add_digest: values");
  auto* const total = static_cast<std::uint64_t*>(arrays.view(sum, "add_digest: sum").data);
  arrays.run([=](Stream& stream) { kernels::add_digest(view, 0, total, stream); });
}

// Rounds masters as a gather does, and *sum += the digest of that. Where `rounded` is shorter, one
// piece after the other goes there, of a multiple of 8 bytes: it may then stay in a cache.
void add_rounded_digest(const MeshHandle* mesh, py::handle masters, py::handle rounded,
                        py::handle sum) {
  Arrays arrays(mesh);
  const TensorView from = arrays.view(masters, "add_rounded_digest: masters");
  const TensorView to = arrays.view(rounded, "add_rounded_digest: rounded");
  auto* const total = static_cast<std::uint64_t*>(arrays.view(sum, "add_rounded_digest: sum").data);
  arrays.run([=](Stream& stream) {
    std::uint64_t place = 0;
    for (std::int64_t begin = 0; begin < from.count; begin += to.count) {
      const std::int64_t count = std::min(to.count, from.count - begin);
      zero::round_into(from.slice(begin, count), to.slice(0, count), stream);
      kernels::add_digest(to.slice(0, count), place, total, stream);
      place += kernels::digest_places(to.slice(0, count));
    }
  });
}

}  // namespace

void bind_masters(py::module_& module) {
  module.def("add_digest", add_digest, py::arg("mesh").none(true), py::arg("values"),
             py::arg("sum"));
  module.def("add_rounded_digest", add_rounded_digest, py::arg("mesh").none(true),
             py::arg("masters"), py::arg("rounded"), py::arg("sum"));
}

}  // namespace hsdp::python
