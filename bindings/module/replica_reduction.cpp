// The replica hop alone, for gradients that something else has scattered: sums an fp32 buffer over
// the replicas by any ReplicaHop, and lets the ranks agree on what they are about to sum.
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
#include "hsdp/device/flag.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/replica_hop.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using Words = std::vector<std::string>;

// Communicators of its own, so that their calls do not mix with other users' of the mesh.
struct Parts {
  Communicator world;
  Communicator replicas;
  Device device;
  std::shared_ptr<ReplicaHop> hop;
  std::shared_ptr<HopOwner> owner;  // of it, where there are several replicas
  Flag nonfinite;
  Event reduced;  // what was enqueued so far
  std::int64_t reduce_count = 0;
  std::int64_t ended_step_count = 0;
};

// What to sum, and who owns its memory.
struct Request {
  HopBucket bucket;
  Dtype wire = Dtype::kF32;
  int shard_size = 1;
  std::int64_t microbatch_count = 1;
  std::shared_ptr<const void> held;
};

void take_hop(Parts& parts) {
  HopPlan plan;
  plan.replicate_size = parts.replicas.size();
  plan.device = parts.device;
  parts.owner = std::make_shared<HopOwner>(parts.hop, std::move(plan));
  parts.owner->prepare();
  Communicator gather;
  if (parts.hop->needs_gather_group()) gather = parts.replicas.split(0, parts.replicas.rank());
  parts.hop->bind(parts.replicas, gather);
}

class ReplicaReduction {
  // Runs `task(parts)`, which may wait, with the GIL released.
  template <typename Task>
  auto call(Task task) {
    process_.require("replica_hook");
    return call_interruptibly(
        [parts = parts_, task = std::move(task)]() mutable { return task(*parts); }, interrupt_);
  }

 public:
  // Collective over the mesh.
  ReplicaReduction(const MeshHandle& mesh, std::shared_ptr<ReplicaHop> hop)
      : interrupt_(mesh.interrupt()), caller_(mesh.caller()) {
    auto split = [own = mesh.mesh(), hop = std::move(hop)]() mutable {
      Parts parts;
      parts.world = own.world().split(0, own.rank());
      parts.replicas = own.replicate_group().split(0, own.replica());
      parts.device = own.device();
      parts.hop = hop ? std::move(hop) : std::make_shared<PlainHop>();
      if (parts.replicas.size() > 1) take_hop(parts);
      parts.nonfinite = make_flag(parts.device);
      return make_owned_by_process(std::move(parts));
    };
    parts_ = call_interruptibly(std::move(split), interrupt_);
  }

  // x = (sum of x over the replicas) / (their number); identical bits on every replica.
  void reduce(py::handle x, const py::dict& how) {
    Request request;
    ArrayArgument array = array_argument(x, "replica_hook: gradients", *caller_);
    request.bucket.data = writable(array, "replica_hook: gradients");
    require_usable(request.bucket.data);
    request.wire = parse_dtype(how["wire"].cast<std::string>());
    request.bucket.bucket = how["bucket"].cast<int>();
    request.shard_size = how["shard_size"].cast<int>();
    request.microbatch_count = how["microbatch_count"].cast<std::int64_t>();
    request.held = hold(std::move(array.owner));
    call([request = std::move(request), stream = caller_->now()](Parts& parts) mutable {
      if (parts.replicas.size() == 1) return;
      HopBucket bucket = request.bucket;
      bucket.arithmetic = hop_arithmetic({.shard_size = request.shard_size,
                                          .replicate_size = parts.replicas.size(),
                                          .replica_wire = parts.hop->wire().value_or(request.wire),
                                          .carry_count = request.microbatch_count,
                                          .replicates = true,
                                          .ends_step = true,
                                          .divisor = static_cast<float>(parts.replicas.size())})
                              .replica;
      bucket.nonfinite = parts.nonfinite.get();
      stream.wait(parts.reduced);  // one after the other, whatever streams they come on
      const Event reduced = parts.hop->reduce(bucket, stream);
      if (bucket.data.device.type == DeviceType::kHost) reduced.wait();
      stream.wait(reduced);
      parts.reduced = stream.record();
      ++parts.reduce_count;
    });
  }

  // Tells every rank of the mesh `word`, without waiting; `collect` of the result reads all words.
  std::string post(const std::string& word) {
    process_.require("replica_hook");
    std::string key = parts_->world.next_exchange_key();
    parts_->world.post(key, word);
    return key;
  }
  Words collect(const std::string& key) {
    return call([key](Parts& parts) { return parts.world.collect(key, "replica_hook"); });
  }
  Words exchange(const std::string& word) {
    return call([word](Parts& parts) { return parts.world.exchange(word, "replica_hook"); });
  }

  // Whether a sum was not finite since the last end_step. Waits for a GPU's sums.
  [[nodiscard]] bool nonfinite() {
    if (caller_->on_host()) return parts_->nonfinite->load() != 0;
    return call([](Parts& parts) {
      parts.reduced.wait();
      return parts.nonfinite->load() != 0;
    });
  }
  void end_step(bool clean) {
    process_.require("replica_hook");
    static_cast<void>(nonfinite());
    parts_->nonfinite->store(0);
    parts_->hop->end_step({.step = parts_->ended_step_count++,
                           .outcome = clean ? StepOutcome::kClean : StepOutcome::kDropped,
                           .cause = {}});
  }

  // How often something went over the replicas.
  [[nodiscard]] std::int64_t all_reduce_count() const { return parts_->reduce_count; }
  [[nodiscard]] std::string hop_name() const { return parts_->hop->describe(); }

 private:
  void require_usable(const TensorView& data) const {
    if (data.dtype == Dtype::kF32 && data.device == parts_->device) return;
    throw UsageError("replica_hook: gradients: expected f32 on " + to_string(parts_->device) +
                     ", got " + std::string(name(data.dtype)) + " on " + to_string(data.device) +
                     "; make the mesh for the model's device");
  }

  OwnProcess process_;
  Interrupt interrupt_;
  std::shared_ptr<CallerStream> caller_;
  std::shared_ptr<Parts> parts_;
};

std::shared_ptr<PlainHop> make_plain_hop(const std::optional<std::string>& dtype) {
  if (!dtype) return std::make_shared<PlainHop>();
  const Dtype wire = parse_dtype(*dtype);
  if (!is_gradient_dtype(wire)) {
    throw UsageError("plain hop: expected dtype 'f32', 'bf16' or 'f16', got '" + *dtype + "'");
  }
  return std::make_shared<PlainHop>(wire);
}

}  // namespace

void bind_replica_reduction(py::module_& module) {
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
  py::class_<ReplicaReduction>(module, "ReplicaReduction")
      .def(py::init<const MeshHandle&, std::shared_ptr<ReplicaHop>>())
      .def("reduce", &ReplicaReduction::reduce)
      .def("post", &ReplicaReduction::post)
      .def("collect", &ReplicaReduction::collect)
      .def("exchange", &ReplicaReduction::exchange)
      .def_property_readonly("nonfinite", &ReplicaReduction::nonfinite)
      .def_property_readonly("all_reduce_count", &ReplicaReduction::all_reduce_count)
      .def_property_readonly("hop_name", &ReplicaReduction::hop_name)
      .def("end_step", &ReplicaReduction::end_step);
}

}  // namespace hsdp::python
