#include "hsdp/mesh.h"

#include <pybind11/stl.h>

#include <filesystem>
#include <optional>
#include <utility>

#include "bindings/module/bindings.h"
#include "bindings/module/mesh_handle.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/error.h"
#include "hsdp/flight_record.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

// "cpu", "cuda" or "cuda:1".
Device parse_device(const std::string& text) {
  if (text == "cpu" || text == "cpu:0") return {};
  if (text == "cuda") return {DeviceType::kCuda, 0};
  if (text.starts_with("cuda:") && text.size() > 5 && text.size() < 9 &&
      text.find_first_not_of("0123456789", 5) == std::string::npos) {
    return {DeviceType::kCuda, std::stoi(text.substr(5))};
  }
  throw UsageError({.where = "mesh: device",
                    .expected = "one like 'cpu', 'cuda' or 'cuda:1'",
                    .got = "'" + text + "'"});
}

MeshHandle connect(int replicate, int shard, const std::string& engine, const std::string& device,
                   const std::vector<std::vector<int>>& ranks, double timeout_s) {
  MeshOptions options;
  options.replicate = replicate;
  options.shard = shard;
  options.engine = engine;
  options.device = parse_device(device);
  options.ranks = ranks;
  options.timeout_s = timeout_s;
  return MeshHandle(call_interruptibly([options] { return init_mesh(options); }));
}

// Rank and size of a job on several hosts without an address to meet at, which torch's store may
// know; MPI finds its own.
std::optional<std::pair<int, int>> needs_store() {
  // Ignore the secret's file: a rank that cannot read it must still go to the store, and report it.
  const comm::LaunchEnvironment launch = comm::detect_launch([](const std::string& name) {
    return name == "HSDP_SECRET_FILE" ? std::nullopt : comm::process_variable(name);
  });
  const bool by_mpi =
      launch.family == comm::LaunchFamily::kOpenMpi || launch.family == comm::LaunchFamily::kPmi;
  if (launch.one_host() || launch.address || by_mpi) return std::nullopt;
  if (!launch.master_address || !launch.master_port) return std::nullopt;
  return std::pair(launch.rank, launch.size);
}

template <typename Result>
auto reader(Result (Mesh::*member)() const) {
  return [member](const MeshHandle& self) {
    const Mesh& mesh = self.mesh();
    static_cast<void>(mesh.world());  // throws UsageError if it is closed
    return (mesh.*member)();
  };
}

CommunicatorHandle group(const MeshHandle& self, GroupKind kind) { return {self, kind}; }

}  // namespace

Communicator& CommunicatorHandle::group() const {
  const Mesh& mesh = mesh_.mesh();
  switch (kind_) {
    case GroupKind::kShard:
      return mesh.shard_group();
    case GroupKind::kReplicate:
      return mesh.replicate_group();
    case GroupKind::kWorld:
      break;
  }
  return mesh.world();
}

void bind_mesh(py::module_& module) {
  module.def("needs_store", needs_store);
  module.def("job_size", [] { return comm::detect_launch().size; });
  module.def("init_mesh", connect, py::arg("replicate"), py::arg("shard"), py::arg("engine"),
             py::arg("device"), py::arg("ranks"), py::arg("timeout_s"));
  py::class_<MeshHandle>(module, "Mesh")
      .def_property_readonly("rank", reader(&Mesh::rank))
      .def_property_readonly("size", reader(&Mesh::size))
      .def_property_readonly("replica", reader(&Mesh::replica))
      .def_property_readonly("shard_rank", reader(&Mesh::shard_rank))
      .def_property_readonly("replicate_size", reader(&Mesh::replicate_size))
      .def_property_readonly("shard_size", reader(&Mesh::shard_size))
      .def_property_readonly("timeout_s", reader(&Mesh::timeout_s))
      .def_property_readonly("device",
                             [](const MeshHandle& self) { return to_string(self.mesh().device()); })
      .def_property_readonly("closed", [](const MeshHandle& self) { return self.mesh().closed(); })
      .def("world", [](const MeshHandle& self) { return group(self, GroupKind::kWorld); })
      .def("shard_group", [](const MeshHandle& self) { return group(self, GroupKind::kShard); })
      .def("replicate_group",
           [](const MeshHandle& self) { return group(self, GroupKind::kReplicate); })
      .def("follow", [](const MeshHandle& self, py::object source,
                        bool is_set) { self.caller()->follow(std::move(source), is_set); })
      .def("flight_record",
           [](const MeshHandle& self, const std::string& folder) {
             py::gil_scoped_release release;
             write_flight_record(self.mesh(), std::filesystem::path(folder));
           })
      .def("close", [](const MeshHandle& self) {
        call_interruptibly([mesh = self.mesh()]() mutable { mesh.close(); });
      });
}

}  // namespace hsdp::python
