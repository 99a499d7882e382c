// RowReducer for gradients scattered by FSDP2, and the plain replica hop.
#include "hsdp/row_reducer.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module/array_argument.h"
#include "bindings/module/bindings.h"
#include "bindings/module/held_object.h"
#include "bindings/module/mesh_handle.h"
#include "hsdp/error.h"
#include "hsdp/replica_hop.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

constexpr std::string_view kGradients = "replica_hook: gradients";

// {"name", "wire", "count", "parameters": [(name, shape, dtype, offset, count, flat_offset)]}; the
// last three describe this rank's slice, in elements.
RowGroup row_group(const py::dict& from) {
  RowGroup group;
  group.name = from["name"].cast<std::string>();
  group.wire = parse_dtype(from["wire"].cast<std::string>());
  group.count = from["count"].cast<std::int64_t>();
  for (const py::handle item : from["parameters"]) {
    const auto [name, shape, dtype, offset, count, flat_offset] = item.cast<
        std::tuple<std::string, Shape, std::string, std::int64_t, std::int64_t, std::int64_t>>();
    const int parameter = static_cast<int>(group.parameters.size());
    group.parameters.push_back({name, shape, parse_dtype(dtype)});
    if (count > 0) group.ranges.push_back({parameter, offset, count, flat_offset});
  }
  return group;
}

std::vector<RowGroup> row_groups(const std::vector<py::dict>& from) {
  std::vector<RowGroup> groups;
  groups.reserve(from.size());
  for (const py::dict& one : from) groups.push_back(row_group(one));
  return groups;
}

class RowReducerHandle {
  // Runs `task(rows)`, which may wait, with the GIL released.
  template <typename Task>
  auto call(Task task) {
    process_.require("replica_hook");
    return call_interruptibly(
        [rows = rows_, task = std::move(task)]() mutable { return task(*rows); }, interrupt_);
  }

 public:
  RowReducerHandle(const MeshHandle& mesh, const std::vector<py::dict>& groups,
                   std::shared_ptr<ReplicaHop> hop, std::int64_t verify_every)
      : interrupt_(mesh.interrupt()), caller_(mesh.caller()) {
    rows_ = call_interruptibly(
        [mesh = mesh.mesh(), groups = row_groups(groups), hop = std::move(hop),
         verify_every]() mutable {
          return make_owned_by_process(
              RowReducer(mesh, std::move(groups), std::move(hop), verify_every));
        },
        interrupt_);
  }

  void set_groups(const std::vector<py::dict>& groups) {
    call([groups = row_groups(groups)](RowReducer& rows) mutable {
      rows.set_groups(std::move(groups));
    });
  }
  void set_requires_all_reduce(bool flag, const std::vector<int>& groups) {
    call([flag, groups](RowReducer& rows) { rows.set_requires_all_reduce(flag, groups); });
  }
  [[nodiscard]] bool requires_all_reduce(int group) const {
    return rows().requires_all_reduce(group);
  }

  void keep(int group, py::handle values) {
    const ArrayArgument array = array_argument(values, kGradients, *caller_);
    Row row;
    row.values = writable(array, kGradients);
    run_released(
        [rows = rows_, group, row, stream = caller_->now()] { rows->keep(group, row, stream); });
  }
  void reduce(int group, const std::optional<py::object>& values, py::handle total,
              int shard_size) {
    Row row;
    row.shard_size = shard_size;
    std::vector<std::shared_ptr<const void>> held;
    if (values) {
      ArrayArgument array = array_argument(*values, kGradients, *caller_);
      row.values = writable(array, kGradients);
      held.push_back(hold(std::move(array.owner)));
    }
    ArrayArgument out = array_argument(total, kGradients, *caller_);
    const TensorView view = writable(out, kGradients);
    held.push_back(hold(std::move(out.owner)));
    call([group, row, view, held = std::move(held), stream = caller_->now()](
             RowReducer& rows) mutable { rows.reduce(group, row, view, stream); });
  }
  void reject(const std::string& message) {
    call([message](RowReducer& rows) { rows.reject(message); });
  }
  void end_backward() {
    call([](RowReducer& rows) { rows.end_backward(); });
  }
  void leave_backward() {
    call([](RowReducer& rows) { rows.leave_backward(); });
  }

  std::vector<int> begin_finish() {
    return call([](RowReducer& rows) { return rows.begin_finish(); });
  }
  void end_finish() {
    call([](RowReducer& rows) { rows.end_finish(); });
  }
  void abandon_step(const std::string& reason) {
    call([reason](RowReducer& rows) { rows.abandon_step(reason); });
  }
  void close() {
    call([](RowReducer& rows) { rows.close(); });
  }
  [[nodiscard]] bool begins_step() const { return rows().begins_step(); }

  [[nodiscard]] std::int64_t count(int group) const { return rows().count(group); }
  [[nodiscard]] bool keeps(int group) const { return rows().keeps(group); }
  [[nodiscard]] std::int64_t kept_bytes() const { return rows().kept_bytes(); }
  [[nodiscard]] std::int64_t all_reduce_count() const { return rows().all_reduce_count(); }
  [[nodiscard]] std::int64_t replica_hop_bytes() const { return rows().replica_hop_bytes(); }

 private:
  [[nodiscard]] RowReducer& rows() const {
    process_.require("replica_hook");
    return *rows_;
  }
  OwnProcess process_;
  Interrupt interrupt_;
  std::shared_ptr<CallerStream> caller_;
  std::shared_ptr<RowReducer> rows_;
};

std::shared_ptr<PlainHop> make_plain_hop(const std::optional<std::string>& dtype) {
  if (!dtype) return std::make_shared<PlainHop>();
  const Dtype wire = parse_dtype(*dtype);
  if (!sums_in_f32(wire)) {
    throw UsageError({.where = "replica hop: PlainHop",
                      .expected = "dtype 'f32', 'bf16' or 'f16'",
                      .got = "'" + *dtype + "'"});
  }
  return std::make_shared<PlainHop>(wire);
}

}  // namespace

void bind_row_reducer(py::module_& module) {
  py::class_<PlainHop, ReplicaHop, std::shared_ptr<PlainHop>>(
      module, "PlainHop",
      "The all-reduce over the replicas in one dtype, summed in fp32: PlainHop(\"f32\"), \"bf16\" "
      "or\n"
      "\"f16\". PlainHop() sends what travels in the shard group.")
      .def(py::init(&make_plain_hop), py::arg("dtype") = py::none())
      .def_property_readonly(
          "dtype",
          [](const PlainHop& self) -> std::optional<std::string> {
            if (!self.wire()) return std::nullopt;
            return std::string(name(*self.wire()));
          },
          "What travels: \"f32\", \"bf16\" or \"f16\"; None: what travels in the shard group.");
  py::class_<RowReducerHandle>(module, "RowReducer")
      .def(py::init<const MeshHandle&, const std::vector<py::dict>&, std::shared_ptr<ReplicaHop>,
                    std::int64_t>())
      .def("set_groups", &RowReducerHandle::set_groups)
      .def("set_requires_all_reduce", &RowReducerHandle::set_requires_all_reduce)
      .def("requires_all_reduce", &RowReducerHandle::requires_all_reduce)
      .def("keep", &RowReducerHandle::keep)
      .def("reduce", &RowReducerHandle::reduce)
      .def("reject", &RowReducerHandle::reject)
      .def("end_backward", &RowReducerHandle::end_backward)
      .def("leave_backward", &RowReducerHandle::leave_backward)
      .def("begin_finish", &RowReducerHandle::begin_finish)
      .def("end_finish", &RowReducerHandle::end_finish)
      .def("abandon_step", &RowReducerHandle::abandon_step)
      .def("close", &RowReducerHandle::close)
      .def("count", &RowReducerHandle::count)
      .def("keeps", &RowReducerHandle::keeps)
      .def_property_readonly("begins_step", &RowReducerHandle::begins_step)
      .def_property_readonly("kept_bytes", &RowReducerHandle::kept_bytes)
      .def_property_readonly("all_reduce_count", &RowReducerHandle::all_reduce_count)
      .def_property_readonly("replica_hop_bytes", &RowReducerHandle::replica_hop_bytes);
}

}  // namespace hsdp::python
