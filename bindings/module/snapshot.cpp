#include "hsdp/snapshot.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/module/array_argument.h"
#include "bindings/module/bindings.h"
#include "bindings/module/held_object.h"
#include "bindings/module/interruptible_call.h"
#include "bindings/module/memory.h"
#include "bindings/module/snapshot_info.h"
#include "bindings/module/text_argument.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

// One named array as Python passes it: (name, shape, dtype or None, offset, array).
struct GivenEntry {
  SnapshotEntry entry;
  std::shared_ptr<const void> held;
};

GivenEntry given_entry(const py::tuple& given) {
  GivenEntry result;
  SnapshotEntry& entry = result.entry;
  entry.name = text_argument(given[0], "snapshot: name");
  const std::string what = "snapshot: array of '" + entry.name + "'";
  ArrayArgument argument = host_array_argument(given[4], what);
  if (argument.view.device.type != DeviceType::kHost) {
    throw UsageError({.where = what,
                      .expected = "host memory",
                      .got = to_string(argument.view.device),
                      .remedy = "copy it to the host first"});
  }
  entry.data = contiguous(argument, what);
  entry.shape = given[1].is_none() ? argument.view.shape : given[1].cast<Shape>();
  entry.dtype = given[2].is_none() ? entry.data.dtype : parse_dtype(given[2].cast<std::string>());
  entry.reduce_dtype = is_gradient_dtype(entry.dtype) ? entry.dtype : Dtype::kF32;
  entry.offset = given[3].cast<std::int64_t>();
  result.held = hold(std::move(argument.owner));
  return result;
}

void write(const std::filesystem::path& path, const py::dict& info, const py::list& given) {
  std::vector<SnapshotEntry> entries;
  std::vector<std::shared_ptr<const void>> held;
  for (const py::handle item : given) {
    GivenEntry one = given_entry(py::reinterpret_borrow<py::tuple>(item));
    entries.push_back(std::move(one.entry));
    held.push_back(std::move(one.held));
  }
  SnapshotInfo parsed = parse_info(info);
  if (info.contains("reduce_dtype")) {
    const Dtype wire = parse_dtype(info["reduce_dtype"].cast<std::string>());
    parsed.replica_dtype = wire;
    for (SnapshotEntry& entry : entries) entry.reduce_dtype = wire;
  }
  const bool whole = parsed.layout == "full";
  call_interruptibly([path, parsed, whole, entries = std::move(entries), held = std::move(held)] {
    whole ? write_snapshot(path, parsed, entries) : write_snapshot_file(path, parsed, entries);
  });
}

py::list parameters(const Snapshot& self) {
  py::list result;
  for (const SnapshotParameter& p : self.parameters()) {
    result.append(py::make_tuple(p.name, py::tuple(py::cast(p.shape)), std::string(name(p.dtype)),
                                 std::string(name(p.reduce_dtype))));
  }
  return result;
}

// Elements [begin, begin + count) of the flattened mean gradient, in new memory.
Memory read(const Snapshot& self, std::size_t parameter, int replica, std::int64_t begin,
            std::int64_t count, const std::string& dtype) {
  const Dtype parsed = parse_dtype(dtype);
  if (parsed != Dtype::kF32 && parsed != Dtype::kF64) {
    throw UsageError(
        {.where = "snapshot: read", .expected = "dtype f32 or f64", .got = "'" + dtype + "'"});
  }
  if (count < 0) {
    throw UsageError({.where = "snapshot: read",
                      .expected = "a count of at least 0",
                      .got = std::to_string(count)});
  }
  return call_interruptibly([self, parameter, replica, begin, count, parsed] {
    Memory memory = Memory::zeros(count, parsed);
    const auto elements = static_cast<std::size_t>(count);
    void* const data = memory.view().data;
    if (parsed == Dtype::kF32) {
      self.read(parameter, replica, begin, std::span(static_cast<float*>(data), elements));
    } else {
      self.read(parameter, replica, begin, std::span(static_cast<double*>(data), elements));
    }
    return memory;
  });
}

// [(key, dtype, count)] of a file.
py::list hop_state(const Snapshot& self, int file) {
  py::list result;
  for (const Snapshot::StateArray& array : self.hop_state(file)) {
    result.append(py::make_tuple(array.key, std::string(name(array.dtype)), array.count));
  }
  return result;
}

Memory read_hop_state(const Snapshot& self, int file, std::size_t number) {
  return call_interruptibly([self, file, number] {
    const Snapshot::StateArray array = self.hop_state(file).at(number);
    Memory memory = Memory::zeros(array.count, array.dtype);
    self.read_hop_state(
        file, number, {static_cast<std::byte*>(memory.view().data), memory.view().size_in_bytes()});
    return memory;
  });
}

// h5py releases the GIL in HDF5 calls and uses its own lock to exclude others. That lock may be
// held for long: Ctrl-C ends the wait.
class LockOfH5py {
 public:
  LockOfH5py() {
    const py::dict modules = py::module_::import("sys").attr("modules");
    if (!modules.contains("h5py._objects")) return;
    lock_ = py::getattr(modules["h5py._objects"], "phil", py::none());
    if (lock_.is_none()) return;
    while (!lock_.attr("acquire")(false).cast<bool>()) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      const py::gil_scoped_release released;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ~LockOfH5py() {
    if (!lock_.is_none()) lock_.attr("release")();
  }
  LockOfH5py(const LockOfH5py&) = delete;
  LockOfH5py& operator=(const LockOfH5py&) = delete;

 private:
  py::object lock_ = py::none();
};

// [Note: others who use HDF5]
void enter_hdf5(const std::function<void()>& enter) {
  run_on_calling_thread([&enter] {
    const LockOfH5py alone;
    enter();
  });
}

}  // namespace

SnapshotInfo parse_info(const py::dict& given) {
  SnapshotInfo info;
  const auto take = [&given](const char* key, auto& value) {
    if (given.contains(key)) value = given[key].cast<std::remove_reference_t<decltype(value)>>();
  };
  take("id", info.id);
  take("step", info.step);
  take("replicate_size", info.replicate_size);
  take("shard_size", info.shard_size);
  take("rank", info.rank);
  take("microbatch_count", info.microbatch_count);
  take("divide_factor", info.divide_factor);
  take("loss_scale", info.loss_scale);
  take("layout", info.layout);
  take("engine", info.engine);
  return info;
}

py::dict info_dict(const SnapshotInfo& info) {
  py::dict d;
  d["id"] = info.id;
  d["reducer"] = info.reducer;
  d["step"] = info.step;
  d["replicate_size"] = info.replicate_size;
  d["shard_size"] = info.shard_size;
  d["microbatch_count"] = info.microbatch_count;
  d["divide_factor"] = info.divide_factor;
  d["loss_scale"] = info.loss_scale;
  d["replica_dtype"] = replica_dtype_text(info);
  d["replica_hop"] = info.replica_hop;
  d["quantizes"] = info.quantizes;
  d["reduction"] = info.reduction;
  d["layout"] = info.layout;
  d["engine"] = info.engine;
  d["partial"] = info.partial;
  return d;
}

void bind_snapshot(py::module_& module) {
  set_hdf5_gate(enter_hdf5);
  module.def("new_snapshot_id", &new_snapshot_id);
  module.def("write_snapshot", write);
  py::class_<Snapshot>(module, "Snapshot")
      .def_static("open",
                  [](const std::filesystem::path& path) {
                    return call_interruptibly([path] { return Snapshot::open(path); });
                  })
      .def_property_readonly("path", [](const Snapshot& self) { return self.path().string(); })
      .def("info", [](const Snapshot& self) { return info_dict(self.info()); })
      .def("parameters", parameters)
      .def_property_readonly("copy_count", &Snapshot::copy_count)
      .def_property_readonly("file_count", &Snapshot::file_count)
      .def("hop_state", hop_state)
      .def("read_hop_state", read_hop_state)
      .def("read", read);
}

}  // namespace hsdp::python
