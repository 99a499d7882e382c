#include "zero/parameter_gather.h"

#include <pybind11/stl.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module/bindings.h"
#include "bindings/module/held_object.h"
#include "bindings/module/reducer_handle.h"
#include "bindings/module/text_argument.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using zero::GatheredParameter;
using zero::ParameterGather;

// Keeps arrays, masters and the Reducer alive while gathers may access them.
class GatherHandle {
 public:
  GatherHandle(ReducerHandle& reducer, const py::dict& arrays, const py::dict& masters,
               std::int64_t unit_bytes, bool of_shard_slices)
      : caller_(reducer.share_caller()), interrupt_(reducer.interrupt()) {
    std::vector<GatheredParameter> parameters;
    for (const ParameterSpec& spec : reducer.reducer().parameters()) {
      if (spec.is_complex) complex_.insert(spec.name);
    }
    for (const auto& [key, value] : arrays) {
      GatheredParameter& one = parameters.emplace_back();
      one.name = text_argument(key, "zero: parameter gather: name");
      names_.push_back(one.name);
      one.array = view(value, "array", one.name, *arrays_);
      if (masters.contains(key)) one.master = view(masters[key], "master", one.name, masters_);
    }
    struct Held {
      std::shared_ptr<Reducer> reducer;
      std::shared_ptr<Owners> arrays;
      Owners masters;
      std::unique_ptr<ParameterGather> gather;  // last: its destructor waits for what uses the rest
    };
    const OwnProcess process;
    auto held = std::make_shared<Held>();
    held->reducer = reducer.share();
    held->arrays = arrays_;
    held->masters = std::move(masters_);
    const auto completes =
        of_shard_slices ? zero::Completes::kShardSlices : zero::Completes::kParameters;
    reducer.call(
        [held, parameters = std::move(parameters), unit_bytes, completes](Reducer& its) mutable {
          held->gather =
              std::make_unique<ParameterGather>(its, std::move(parameters), unit_bytes, completes);
        });
    ParameterGather* const gather = held->gather.get();
    gather_ = {gather, [held = std::move(held), process](ParameterGather*) mutable {
                 if (!process.here()) {
                   static_cast<void>(held->gather.release());
                   return;
                 }
                 std::optional<py::gil_scoped_release> released;
                 if (PyGILState_Check() != 0) released.emplace();
                 held->gather.reset();
               }};
  }

  [[nodiscard]] const std::shared_ptr<ParameterGather>& share() const { return gather_; }
  void start() {
    const Event updated = caller_->on_host() ? Event() : caller_->now().record();
    call_released([gather = gather_, updated] { gather->start_all(updated); });
  }
  [[nodiscard]] bool is_ready(int parameter) const { return gather_->ready(parameter).complete(); }
  void wait(int parameter) {
    if (!caller_->on_host()) {
      Stream reader = caller_->now();
      gather_->wait(parameter, reader);
    } else if (is_ready(parameter)) {
      gather_->wait(parameter);  // throws an error of the gather
    } else {
      call_interruptibly([gather = gather_, parameter] { gather->wait(parameter); }, interrupt_);
    }
  }
  void fence() {
    if (caller_->on_host()) {
      call_interruptibly([gather = gather_] { gather->wait_all(); }, interrupt_);
    } else {
      Stream writer = caller_->now();
      gather_->fence(writer);
    }
  }
  void rebind(int parameter, py::handle array) {
    Owners owner;
    const auto place = static_cast<std::size_t>(parameter);
    gather_->rebind(parameter, view(array, "array", names_.at(place), owner));
    arrays_->at(place) = std::move(owner.front());
  }
  // A rank that cannot update its slices ends the world: the others wait for them.
  void abort(const std::string& reason) {
    call_released([interrupt = interrupt_, reason] { interrupt(reason); });
  }
  [[nodiscard]] int find(const std::string& name) const { return gather_->find(name); }
  [[nodiscard]] std::vector<std::vector<int>> units() const {
    std::vector<std::vector<int>> all;
    for (int u = 0; u < gather_->unit_count(); ++u) all.push_back(gather_->unit(u));
    return all;
  }
  [[nodiscard]] py::dict stats() const {
    const zero::GatherStats stats = gather_->stats();
    py::dict d;
    d["gather_count"] = stats.gather_count;
    d["bytes"] = stats.bytes;
    d["exposed_s"] = stats.exposed_s;
    return d;
  }
  [[nodiscard]] std::vector<std::pair<double, double>> last_times() const {
    std::vector<std::pair<double, double>> all;
    for (const zero::GatherTime& one : gather_->last_times()) {
      all.emplace_back(one.begin_s, one.end_s);
    }
    return all;
  }

 private:
  using Owners = std::vector<std::shared_ptr<const void>>;

  TensorView view(py::handle array, const char* kind, const std::string& name, Owners& owners) {
    const std::string what = std::string("zero: parameter gather: ") + kind + " of '" + name + "'";
    const Complex of_complex = complex_of(complex_.contains(name));
    ArrayArgument argument = array_argument(array, what, *caller_, of_complex);
    const TensorView view = writable(argument, what);
    owners.push_back(hold(std::move(argument.owner)));
    return view;
  }

  std::shared_ptr<CallerStream> caller_;
  Interrupt interrupt_;
  std::set<std::string> complex_;                                // the Reducer's complex parameters
  std::vector<std::string> names_;                               // by parameter
  std::shared_ptr<Owners> arrays_ = std::make_shared<Owners>();  // by parameter
  Owners masters_;
  std::shared_ptr<ParameterGather> gather_;
};

}  // namespace

std::shared_ptr<zero::ParameterGather> shared_gather(py::handle gather) {
  return gather.cast<const GatherHandle&>().share();
}

void bind_parameter_gather(py::module_& module) {
  py::class_<GatherHandle>(module, "ParameterGather")
      .def(py::init<ReducerHandle&, const py::dict&, const py::dict&, std::int64_t, bool>())
      .def("start", &GatherHandle::start)
      .def("is_ready", &GatherHandle::is_ready)
      .def("wait", &GatherHandle::wait)
      .def("fence", &GatherHandle::fence)
      .def("rebind", &GatherHandle::rebind)
      .def("abort", &GatherHandle::abort)
      .def("find", &GatherHandle::find)
      .def("units", &GatherHandle::units)
      .def("stats", &GatherHandle::stats)
      .def("last_times", &GatherHandle::last_times);
}

}  // namespace hsdp::python
