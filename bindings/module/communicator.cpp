#include "hsdp/comm/communicator.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/module/array_argument.h"
#include "bindings/module/bindings.h"
#include "bindings/module/held_object.h"
#include "bindings/module/memory.h"
#include "bindings/module/mesh_handle.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using Handle = CommunicatorHandle;

// Runs `task(group, stream)` with the GIL released; `arrays` live until it is done, even if it is
// abandoned. On a GPU it is done when it is enqueued on the caller's stream.
template <typename Task>
auto collective(const Handle& self, std::vector<ArrayArgument> arrays, Task task) {
  std::vector<std::shared_ptr<const void>> held;
  for (ArrayArgument& array : arrays) held.push_back(hold(std::move(array.owner)));
  auto call = [group = self.group(), stream = self.mesh().caller()->now(), held = std::move(held),
               task = std::move(task)]() mutable { return task(group, stream); };
  if (self.group().size() == 1) return call_released(std::move(call));
  return call_interruptibly(std::move(call), self.mesh().interrupt());
}

ArrayArgument argument(const Handle& self, py::handle x, std::string_view what) {
  return array_argument(x, what, *self.mesh().caller());
}

void all_reduce(const Handle& self, py::handle x) {
  ArrayArgument array = argument(self, x, "all_reduce: x");
  const TensorView data = writable(array, "all_reduce: x");
  collective(self, {std::move(array)},
             [data](Communicator& group, const Stream& stream) { group.all_reduce(data, stream); });
}

// In place: the sum over the ranks divided by their number.
void mean(const Handle& self, py::handle x) {
  ArrayArgument array = argument(self, x, "mean: x");
  const TensorView data = writable(array, "mean: x");
  if (!sums_in_f32(data.dtype)) {
    throw UsageError({.where = "mean: x",
                      .expected = "f32, bf16 or f16",
                      .got = std::string(name(data.dtype)),
                      .remedy = "use all_reduce and divide"});
  }
  collective(self, {std::move(array)}, [data](Communicator& group, const Stream& stream) {
    group.all_reduce({.data = data, .divisor = static_cast<float>(group.size())}, stream);
  });
}

// Where a collective writes its result: the caller's array, or new memory.
struct Output {
  TensorView view;
  std::optional<ArrayArgument> given;
  std::optional<Memory> made;

  Output(const Handle& self, const py::object& out, std::string_view what, std::int64_t count,
         Dtype dtype) {
    if (out.is_none()) {
      made = Memory::create(count, dtype, self.mesh().caller()->now());
      view = made->view();
    } else {
      given = argument(self, out, what);
      view = writable(*given, what);
    }
  }
  [[nodiscard]] py::object result(const Handle& self, const py::object& out) {
    if (!made) return out;
    CallerStream& caller = *self.mesh().caller();
    if (!caller.on_host()) made->set_ready(caller.now().record());
    return py::cast(*made);
  }
};

py::object reduce_scatter(const Handle& self, py::handle x, const py::object& out) {
  ArrayArgument array = argument(self, x, "reduce_scatter: x");
  const ConstTensorView in = contiguous(array, "reduce_scatter: x");
  const Communicator& members = self.group();
  const RowCut cut(in.count, members.size());
  Output output(self, out, "reduce_scatter: out", cut.length(members.rank()), in.dtype);
  std::vector<ArrayArgument> arrays{std::move(array)};
  if (output.given) arrays.push_back(*output.given);
  collective(
      self, std::move(arrays),
      [in, view = output.view, made = output.made](Communicator& group, const Stream& stream) {
        group.reduce_scatter(in, view, stream);
      });
  return output.result(self, out);
}

// For rows of any length: the ranks exchange them first.
RowCut agreed_rows(const Handle& self, std::int64_t count) {
  return collective(self, {}, [count](Communicator& group, const Stream& /*stream*/) {
    std::vector<std::int64_t> offsets{0};
    for (const std::string& length : group.exchange(std::to_string(count), "all_gather")) {
      offsets.push_back(offsets.back() + std::stoll(length));
    }
    return RowCut(std::move(offsets));
  });
}

py::object all_gather(const Handle& self, py::handle x, const py::object& out) {
  ArrayArgument array = argument(self, x, "all_gather: x");
  const ConstTensorView in = contiguous(array, "all_gather: x");
  std::optional<RowCut> cut;
  if (out.is_none()) cut = agreed_rows(self, in.count);
  Output output(self, out, "all_gather: out", cut ? cut->count() : 0, in.dtype);
  std::vector<ArrayArgument> arrays{std::move(array)};
  if (output.given) arrays.push_back(*output.given);
  collective(
      self, std::move(arrays),
      [in, view = output.view, made = output.made, cut](Communicator& group, const Stream& stream) {
        group.all_gather(in, view, stream, cut);
      });
  return output.result(self, out);
}

void broadcast(const Handle& self, py::handle x, int root) {
  ArrayArgument array = argument(self, x, "broadcast: x");
  const TensorView data = writable(array, "broadcast: x");
  collective(self, {std::move(array)}, [data, root](Communicator& group, const Stream& stream) {
    group.broadcast(data, root, stream);
  });
}

// A barrier of the processes, not of their GPUs.
void barrier(const Handle& self) {
  collective(self, {}, [](Communicator& group, const Stream& stream) {
    if (stream.device().type == DeviceType::kHost) {
      group.barrier();
    } else {
      static_cast<void>(group.exchange("", "barrier"));
    }
  });
}

Memory allocate(const Handle& self, std::int64_t count, const std::string& dtype) {
  const Dtype parsed = parse_dtype(dtype);
  const SharedMemory memory =
      collective(self, {}, [count, parsed](Communicator& group, const Stream& /*stream*/) {
        return group.allocate(count, parsed);
      });
  return {memory.view(), {count}, make_owned_by_process(memory)};
}

std::vector<std::string> exchange(const Handle& self, const std::string& message,
                                  const std::string& act) {
  return collective(self, {}, [message, act](Communicator& group, const Stream& /*stream*/) {
    return group.exchange(message, act);
  });
}

py::dict counts(const Handle& self) {
  const CollectiveCounts all = self.group().stats();
  static constexpr const char* kNames[] = {"reduce_scatter", "all_reduce", "all_gather",
                                           "all_to_all",     "broadcast",  "barrier"};
  py::dict result;
  for (std::size_t i = 0; i < all.kinds.size(); ++i) {
    result[kNames[i]] = py::make_tuple(all.kinds[i].calls, all.kinds[i].bytes);
  }
  return result;
}

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<Handle>(module, "Communicator")
      .def_property_readonly("rank", [](const Handle& self) { return self.group().rank(); })
      .def_property_readonly("size", [](const Handle& self) { return self.group().size(); })
      .def_property_readonly("ranks", [](const Handle& self) { return self.group().world_ranks(); })
      .def_property_readonly(
          "transport",
          [](const Handle& self) { return std::string(name(self.group().transport())); })
      .def("all_reduce", all_reduce)
      .def("mean", mean)
      .def("reduce_scatter", reduce_scatter)
      .def("all_gather", all_gather)
      .def("broadcast", broadcast)
      .def("barrier", barrier)
      .def("allocate", allocate)
      .def("exchange", exchange)
      .def("counts", counts);
}

}  // namespace hsdp::python
