#include "zero/unit_gather.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module/bindings.h"
#include "bindings/module/held_object.h"
#include "bindings/module/reducer_handle.h"
#include "zero/parameter_gather.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using zero::ParameterUnit;
using zero::UnitGather;
using zero::UnitParameter;

// A parameter: name, dtype, element count and slice; a unit: its name and parameters.
using GivenParameter = std::tuple<std::string, std::string, std::int64_t, py::object>;
using GivenUnit = std::pair<std::string, std::vector<GivenParameter>>;

// Keeps slices and the Reducer alive while gathers may access them, and the owner of a unit's
// arrays until its next gather.
class UnitGatherHandle {
 public:
  UnitGatherHandle(ReducerHandle& reducer, const std::vector<GivenUnit>& given)
      : caller_(reducer.share_caller()), interrupt_(reducer.interrupt()) {
    struct Held {
      std::shared_ptr<Reducer> reducer;
      std::vector<std::shared_ptr<const void>> slices;
      std::shared_ptr<std::vector<std::shared_ptr<const void>>> arrays;
      std::unique_ptr<UnitGather> gather;  // last: its destructor waits for what uses the rest
    };
    const OwnProcess process = process_;
    auto held = std::make_shared<Held>();
    std::vector<ParameterUnit> units;
    for (const auto& [name, parameters] : given) {
      ParameterUnit& unit = units.emplace_back(ParameterUnit{name, {}});
      std::vector<UnitParameter> parts;
      for (const auto& [its_name, dtype, count, stored] : parameters) {
        const std::string what = "zero: unit gather: slice of '" + its_name + "'";
        ArrayArgument argument = array_argument(stored, what, *caller_, Complex::kAsReal);
        const TensorView view = writable(argument, what);
        held->slices.push_back(hold(std::move(argument.owner)));
        unit.parameters.push_back({its_name, parse_dtype(dtype), count, view});
        parts.push_back(unit.parameters.back());
      }
      parts_.push_back(std::move(parts));
    }
    held->arrays = arrays_;
    arrays_->resize(units.size());
    held->reducer = reducer.share();
    device_ = held->reducer->device();
    reducer.call([held, units = std::move(units)](Reducer& its) mutable {
      held->gather = std::make_unique<UnitGather>(its, std::move(units));
    });
    UnitGather* const gather = held->gather.get();
    gather_ = {gather, [held = std::move(held), process](UnitGather*) mutable {
                 if (!process.here()) {
                   static_cast<void>(held->gather.release());
                   return;
                 }
                 std::optional<py::gil_scoped_release> released;
                 if (PyGILState_Check() != 0) released.emplace();
                 held->gather.reset();
               }};
  }

  // `parts` completes the slices of units: of each its parameters there, by number.
  void read_after(py::handle parts, const std::vector<std::vector<int>>& numbers) {
    gather_->read_after([gather = shared_gather(parts), numbers](int unit) {
      std::vector<Event> events;
      for (const int number : numbers.at(static_cast<std::size_t>(unit))) {
        events.push_back(gather->ready(number));
      }
      return events;
    });
  }
  // `pointers`: the whole arrays of the unit, which `owner` keeps alive.
  void gather(int unit, const std::vector<std::uintptr_t>& pointers, py::object owner) {
    const std::vector<UnitParameter>& parts = parts_.at(static_cast<std::size_t>(unit));
    if (pointers.size() != parts.size()) {
      throw UsageError({.where = "zero: unit gather",
                        .expected = std::to_string(parts.size()) + " arrays",
                        .got = std::to_string(pointers.size())});
    }
    std::vector<TensorView> arrays;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): passed by torch as an int
      void* const data = reinterpret_cast<void*>(pointers[p]);
      arrays.push_back({data, parts[p].count, parts[p].dtype, device_});
    }
    std::shared_ptr<const void>& kept = arrays_->at(static_cast<std::size_t>(unit));
    kept = hold(std::move(owner));
    auto call = [gather = here(), unit, arrays = std::move(arrays), updated = updated()]() mutable {
      gather->gather(unit, std::move(arrays), updated);
    };
    if (here()->waits_for_opening()) {
      call_interruptibly(std::move(call), interrupt_);
    } else {
      call_released(std::move(call));
    }
  }
  [[nodiscard]] bool comes_next(int unit) {
    auto call = [gather = here(), unit] { return gather->comes_next(unit); };
    return here()->waits_for_opening() ? call_interruptibly(std::move(call), interrupt_)
                                       : call_released(std::move(call));
  }
  void wait(int unit) {
    if (!caller_->on_host()) {
      Stream reader = caller_->now();
      here()->wait(unit, reader);
    } else {
      call_interruptibly([gather = here(), unit] { gather->wait(unit); }, interrupt_);
    }
  }
  void end() {
    wait_for(call_interruptibly(
        [gather = here(), updated = updated()] { return gather->end(updated); }, interrupt_));
  }
  void begin_update() {
    wait_for(call_interruptibly(
        [gather = here(), updated = updated()] { return gather->begin_update(updated); },
        interrupt_));
  }
  void abort(const std::string& reason) {
    call_released([interrupt = interrupt_, reason] { interrupt(reason); });
  }
  [[nodiscard]] py::dict stats() const {
    const zero::GatherStats stats = gather_->stats();
    py::dict d;
    d["gather_count"] = stats.gather_count;
    d["bytes"] = stats.bytes;
    d["exposed_s"] = stats.exposed_s;
    return d;
  }

 private:
  // A forked child has no thread that gathers.
  const std::shared_ptr<UnitGather>& here() const {
    process_.require("zero: unit gather");
    return gather_;
  }
  // What the caller has enqueued so far, an update of its slices too.
  [[nodiscard]] Event updated() const {
    return caller_->on_host() ? Event() : caller_->now().record();
  }
  void wait_for(const Event& over) {
    if (!caller_->on_host()) caller_->now().wait(over);
  }

  OwnProcess process_;
  std::shared_ptr<CallerStream> caller_;
  Interrupt interrupt_;
  Device device_{};
  std::vector<std::vector<UnitParameter>> parts_;  // by unit
  std::shared_ptr<std::vector<std::shared_ptr<const void>>> arrays_ =
      std::make_shared<std::vector<std::shared_ptr<const void>>>();  // by unit
  std::shared_ptr<UnitGather> gather_;
};

std::pair<std::int64_t, std::int64_t> even_slice(std::int64_t count, int shard_size,
                                                 int shard_rank) {
  const Slice slice = UnitGather::even_slice(count, shard_size, shard_rank);
  return {slice.offset, slice.count};
}

}  // namespace

void bind_unit_gather(py::module_& module) {
  py::class_<UnitGatherHandle>(module, "UnitGather")
      .def(py::init<ReducerHandle&, const std::vector<GivenUnit>&>())
      .def_static("even_slice", &even_slice)
      .def("read_after", &UnitGatherHandle::read_after)
      .def("gather", &UnitGatherHandle::gather)
      .def("comes_next", &UnitGatherHandle::comes_next)
      .def("wait", &UnitGatherHandle::wait)
      .def("end", &UnitGatherHandle::end)
      .def("begin_update", &UnitGatherHandle::begin_update)
      .def("abort", &UnitGatherHandle::abort)
      .def("stats", &UnitGatherHandle::stats);
}

}  // namespace hsdp::python
