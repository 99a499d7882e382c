#include "hsdp/reducer.h"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/module/bindings.h"
#include "bindings/module/held_object.h"
#include "bindings/module/reducer_handle.h"
#include "bindings/module/text_argument.h"
#include "hsdp/comm/operation_record.h"
#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/reducer_internal.h"
#include "hsdp/trace.h"
#include "zero/coalesced_window.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using Handle = ReducerHandle;
using OptionalText = std::optional<std::string>;

// Parses one of a few words; a UsageError lists them.
template <typename Choices>
auto choose(const std::string& option, const std::string& got, const Choices& choices) {
  std::string accepted;
  for (const auto& [word, value] : choices) {
    if (got == word) return value;
    accepted += (accepted.empty() ? "'" : ", '") + std::string(word) + "'";
  }
  throw UsageError(
      {.where = "reducer: " + option, .expected = "one of " + accepted, .got = "'" + got + "'"});
}

std::optional<Dtype> wire_dtype(const std::string& option, const OptionalText& text) {
  static constexpr std::array<Choice<Dtype>, 3> kWires{
      {{"f32", Dtype::kF32}, {"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}}};
  if (!text) return std::nullopt;
  return choose(option, *text, kWires);
}

// Sets an option from a Python value, by the option's type.
struct SetOption {
  const py::dict& given;

  [[nodiscard]] std::string text(const char* key) const {
    return text_argument(given[key], std::string("reducer: ") + key);
  }
  void operator()(const char* key, std::optional<Dtype>& value) const {
    value = wire_dtype(key, given[key].cast<OptionalText>());
  }
  void operator()(const char* key, std::optional<std::int64_t>& value) const {
    value = given[key].cast<std::optional<std::int64_t>>();
  }
  void operator()(const char* key, std::int64_t& value) const {
    value = given[key].cast<std::int64_t>();
  }
  void operator()(const char* key, std::string& value) const { value = text(key); }
  template <typename Value>
  void operator()(const char* key, Value& value) const {
    value = choose(key, text(key), choices(value));
  }
  void operator()(const char* key, std::shared_ptr<ReplicaHop>& value) const {
    const py::object hop = given[key];
    if (hop.is_none()) return;
    if (!py::isinstance<ReplicaHop>(hop)) {
      throw UsageError({.where = "reducer: replica_hop",
                        .expected = "an hsdp.ReplicaHop",
                        .got = "an object of type " + type_name(hop),
                        .remedy = "pass hsdp.PlainHop(\"bf16\") or hsdp.quant.LocoHop()"});
    }
    value = hop.cast<std::shared_ptr<ReplicaHop>>();
  }
};

std::unique_ptr<Handle> make_reducer(const MeshHandle& mesh, const py::dict& given) {
  ReducerOptions options;
  visit_fields(options, SetOption{given});
  return std::make_unique<Handle>(mesh, std::move(options));
}

int register_parameter(Handle& self, py::handle name, const Shape& shape, const std::string& dtype,
                       const OptionalText& reduce_dtype, const std::string& group,
                       bool is_complex) {
  ParameterSpec spec;
  spec.name = text_argument(name, "reducer: register: name");
  spec.shape = shape;
  spec.dtype = parse_dtype(dtype);
  spec.reduce_dtype = wire_dtype("reduce_dtype", reduce_dtype);
  spec.group = group;
  spec.is_complex = is_complex;
  return self.register_parameter(spec);
}

py::list parameter_specs(const Handle& self) {
  py::list result;
  for (const ParameterSpec& spec : self.reducer().parameters()) {
    const py::object reduce_dtype =
        spec.reduce_dtype ? py::cast(std::string(name(*spec.reduce_dtype))) : py::none();
    result.append(py::make_tuple(spec.name, py::tuple(py::cast(spec.shape)),
                                 std::string(name(spec.dtype)), reduce_dtype, spec.group,
                                 spec.is_complex));
  }
  return result;
}

void begin_microbatch(Handle& self, std::optional<bool> last, const OptionalText& sync,
                      std::optional<bool> has_batch) {
  MicrobatchOptions options;
  options.last = last;
  options.has_batch = has_batch;
  if (sync) {
    options.sync = choose("sync", *sync, choices(Sync{}));
  }
  self.begin_microbatch(options);
}

void set_partial_sync(const Handle& self, py::handle sync) {
  static constexpr std::array<Choice<Sync>, 2> kPartial{
      {{"shard", Sync::kShard}, {"none", Sync::kNone}}};
  self.reducer().set_partial_sync(
      choose("set_partial_sync", text_argument(sync, "reducer: set_partial_sync: sync"), kPartial));
}

void begin_window(Handle& self, std::optional<bool> last, std::optional<std::int64_t> backwards,
                  py::handle accumulate, py::handle accumulate_dtype,
                  std::optional<bool> has_batch) {
  const auto text = [](py::handle word, const char* option) {
    return text_argument(word, std::string("zero: coalesce_grad_reduction: ") + option);
  };
  WindowOptions options{.last = last, .backwards = backwards, .has_batch = has_batch};
  options.accumulate = choose("accumulate", text(accumulate, "accumulate"), choices(Accumulate{}));
  options.accumulate_dtype = choose("accumulate_dtype", text(accumulate_dtype, "accumulate_dtype"),
                                    choices(AccumulateDtype{}));
  self.call([options](Reducer& reducer) { reducer.begin_window(options); });
}

// A tensor by address, of the registered shape and dtype; strides in elements, or None.
void gradient_of(Handle& self, int parameter, std::uintptr_t address, const py::object& strides,
                 py::object owner) {
  StridedView view;
  view.data = reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
  if (!strides.is_none()) view.strides = strides.cast<Shape>();
  self.gradient_of(parameter, std::move(view), std::move(owner));
}

// Writes the step's found_inf as 1 or 0 to an array of one f32.
void found_inf_word(Handle& self, py::handle out) {
  const std::string what = "reducer: found_inf_tensor: out";
  ArrayArgument argument = array_argument(out, what, self.caller());
  const TensorView word = writable(argument, what);
  self.call([word, held = hold(std::move(argument.owner))](Reducer& reducer) {
    const bool on_host = word.device.type == DeviceType::kHost;
    if (on_host) static_cast<void>(reducer.found_inf());  // waits; throws if the step was dropped
    const Event done = reducer.found_inf(word);
    if (on_host) done.wait();
  });
}

Memory shard(Handle& self, py::handle name) {
  return self.shard(text_argument(name, "reducer: shard: name"));
}

Memory partial_shard(Handle& self, py::handle name) {
  return self.partial_shard(text_argument(name, "reducer: partial_shard: name"));
}

Memory local_sum(Handle& self, py::handle name) {
  return self.local_sum(text_argument(name, "reducer: local_sum: name"));
}

Memory copy_of(Handle& self, py::handle gradient) {
  const ArrayArgument argument = array_argument(gradient, "reducer: gradient", self.caller());
  Stream stream = self.caller().now();
  const Dtype dtype = sum_dtype(argument.view.dtype);
  const Memory copy = Memory::create(argument.view.count(), dtype, stream);
  kernels::CastAndPack args;
  args.gradient = &argument.view;
  args.count = argument.view.count();
  args.out = copy.view().data;
  args.out_dtype = dtype;
  kernels::cast_and_pack(args, stream);
  return {copy.view(), argument.view.shape, std::make_shared<Memory>(copy), stream.record()};
}

py::tuple slice(const Handle& self, py::handle name) {
  const Slice found = self.reducer().slice(text_argument(name, "reducer: slice: name"));
  return py::make_tuple(found.offset, found.count);
}

py::tuple balance(const Handle& self) {
  const LayoutBalance found = self.reducer().layout().balance();
  return py::make_tuple(found.elements, found.traffic);
}

// Arrays of whole parameters by name, kept alive by the task that fills them.
struct NamedArrays {
  std::vector<NamedArray> arrays;
  std::vector<std::shared_ptr<const void>> held;

  NamedArrays(const Handle& self, const py::dict& given, const std::string& call) {
    std::unordered_map<std::string_view, const ParameterSpec*> specs;
    for (const ParameterSpec& spec : self.reducer().parameters()) specs.emplace(spec.name, &spec);
    for (const auto& [key, value] : given) {
      const std::string name = text_argument(key, "reducer: " + call + ": name");
      const std::string what = "reducer: " + call + ": array of '" + name + "'";
      const auto found = specs.find(name);
      const ParameterSpec* const spec = found == specs.end() ? nullptr : found->second;
      ArrayArgument argument = array_argument(value, what, self.caller(),
                                              complex_of(spec != nullptr && spec->is_complex));
      if (spec != nullptr && spec->shape != argument.view.shape) {
        throw UsageError({.where = what,
                          .expected = "shape " + to_string(spec->shape),
                          .got = to_string(argument.view.shape)});
      }
      arrays.push_back({name, writable(argument, what)});
      held.push_back(hold(std::move(argument.owner)));
    }
  }
};

// Keeps arrays with the Reducer if a GPU may still write to them after the world has ended.
template <typename Gather>
void gather(Handle& self, const py::dict& given, const char* what, Gather call) {
  const auto named = std::make_shared<NamedArrays>(self, given, what);
  try {
    self.call([named, call](Reducer& reducer) { (reducer.*call)(named->arrays); });
  } catch (...) {
    if (self.reducer().state().phase == ReducerState::Phase::kFailed) self.keep(named);
    throw;
  }
}

void gather_gradients(Handle& self, const py::dict& given) {
  gather(self, given, "gather_gradients", &Reducer::gather_gradients);
}

void gather_parameters(Handle& self, const py::dict& given) {
  gather(self, given, "gather_parameters", &Reducer::gather_parameters);
}

// Returns the norm before clipping: one f64 on the mesh's device.
Memory clip_together(const std::vector<Handle*>& handles, double max_norm) {
  if (handles.empty()) {
    throw UsageError({.where = "reducer: clip_grad_norm_",
                      .expected = "Reducers",
                      .got = "none",
                      .remedy = "pass one or several"});
  }
  std::vector<std::shared_ptr<Reducer>> shared;
  for (const Handle* handle : handles) shared.push_back(handle->share());
  CallerStream& caller = handles.front()->caller();
  Memory norm = Memory::create(1, Dtype::kF64, caller.now());
  handles.front()->call([shared = std::move(shared), max_norm, norm](Reducer&) {
    std::vector<Reducer*> reducers;
    for (const std::shared_ptr<Reducer>& reducer : shared) reducers.push_back(reducer.get());
    const TensorView out = norm.view();
    if (out.device.type == DeviceType::kHost) {
      *static_cast<double*>(out.data) = hsdp::clip_grad_norm(reducers, max_norm);
    } else {
      hsdp::clip_grad_norm(reducers, max_norm, out);
    }
  });
  handles.front()->set_ready(norm);
  return norm;
}

void hear_drops(const std::vector<Handle*>& handles) {
  std::vector<std::shared_ptr<Reducer>> shared;
  for (const Handle* handle : handles) shared.push_back(handle->share());
  handles.front()->call([shared = std::move(shared)](Reducer&) {
    std::vector<Reducer*> reducers;
    for (const std::shared_ptr<Reducer>& reducer : shared) reducers.push_back(reducer.get());
    zero::hear_drops(reducers);
  });
}

py::dict stats(const Handle& self) {
  const ReducerStats s = self.reducer().stats();
  py::dict d;
  visit_fields(s, [&d](const char* name, const auto& value) { d[name] = value; });
  py::list links;
  for (const ControlLinkStats& link : s.control_links) {
    links.append(py::make_tuple(link.peer, link.sent_count, link.sent_bytes, link.received_count,
                                link.received_bytes));
  }
  d["control_links"] = links;
  return d;
}

py::dict memory_plan(const Handle& self, const OptionalText& local_sums, bool totals) {
  MemoryUse use{.totals = totals};
  if (local_sums) {
    use.local_sums = choose("memory_plan: local_sums", *local_sums, choices(AccumulateDtype{}));
  }
  py::dict d;
  visit_fields(self.reducer().memory_plan(use),
               [&d](const char* name, std::int64_t value) { d[name] = value; });
  return d;
}

py::tuple wait_table(Handle& self) {
  const WaitTable table = self.call([](Reducer& reducer) { return reducer.wait_table(); });
  py::dict seconds;
  for (const WaitTable::Wait& wait : table.waits) {
    seconds[py::make_tuple(wait.waiting, wait.awaited)] = wait.seconds;
  }
  return py::make_tuple(seconds, table.operations, table.steps, table.span_s, table.clock_error_s,
                        table.unexplained_s, table.straggler, table.text());
}

// Bytes that count until Python releases this object.
struct HeldBytes {
  MemoryCount::Held held;
};

HeldBytes hold_optimizer_bytes(const Handle& self, std::int64_t count) {
  return {ReducerInternal(self.reducer()).memory_count().hold(MemoryKind::kOptimizer, count)};
}

// An update of an optimizer, until it is closed.
class Update {
 public:
  explicit Update(const Handle& self)
      : reducer_(self.share()),
        operation_(std::in_place, ReducerInternal(*reducer_).operations(),
                   OperationPlace{.kind = OperationKind::kUpdate, .step = reducer_->state().step}) {
  }
  void close() { operation_.reset(); }

 private:
  std::shared_ptr<Reducer> reducer_;
  std::optional<Operation> operation_;
};

// A trace that runs, with the Reducer that it is of.
class RunningTrace {
 public:
  RunningTrace(Handle& handle, const std::string& path)
      : reducer_(handle.share()), interrupt_(handle.interrupt()) {
    trace_ =
        handle.call([path](Reducer& reducer) { return std::make_shared<Trace>(reducer, path); });
  }
  void write() {
    call_interruptibly([reducer = reducer_, trace = trace_] { trace->write(); }, interrupt_);
  }
  void leave(const std::string& reason) { trace_->leave(reason); }

 private:
  std::shared_ptr<Reducer> reducer_;
  Interrupt interrupt_;
  std::shared_ptr<Trace> trace_;
};

using Class = py::class_<Handle>;

void bind_settings(Class& bound) {
  bound.def(py::init(&make_reducer))
      .def("register", register_parameter)
      .def("parameters", parameter_specs)
      .def("set_requires_gradient_sync",
           [](const Handle& self, bool flag, const OptionalText& group) {
             self.reducer().set_requires_gradient_sync(flag, group);
           })
      .def("set_requires_all_reduce",
           [](const Handle& self, bool flag, const OptionalText& group) {
             self.reducer().set_requires_all_reduce(flag, group);
           })
      .def("set_partial_sync", set_partial_sync)
      .def("set_gradient_divide_factor",
           [](const Handle& self, std::optional<double> factor) {
             self.reducer().set_gradient_divide_factor(factor);
           })
      .def("set_loss_scale",
           [](const Handle& self, double scale) { self.reducer().set_loss_scale(scale); })
      .def("divide_by_tokens",
           [](const Handle& self, std::int64_t count) { self.reducer().divide_by_tokens(count); })
      .def("stats", stats)
      .def("memory_plan", memory_plan)
      .def("wait_table", wait_table)
      .def("trace",
           [](Handle& self, const std::string& path) {
             return std::make_unique<RunningTrace>(self, path);
           })
      .def("hold_optimizer_bytes", hold_optimizer_bytes)
      .def("update", [](const Handle& self) { return Update(self); })
      .def("step_number", [](const Handle& self) { return self.reducer().state().step; })
      .def("has_gradient", [](const Handle& self,
                              int p) { return ReducerInternal(self.reducer()).has_gradient(p); })
      .def("step_begun", [](const Handle& self) { return self.reducer().state().step_begun; })
      .def("pending", [](const Handle& self) { return self.reducer().state().pending; })
      .def("step_dropped", [](const Handle& self) { return self.reducer().state().step_dropped; })
      .def("window_open", [](const Handle& self) { return self.reducer().state().window_open; })
      .def("is_collecting", [](const Handle& self) {
        return self.reducer().state().phase == ReducerState::Phase::kCollecting;
      });
}

void bind_step(Class& bound) {
  bound
      .def("set_units",
           [](Handle& self, const std::vector<int>& units) {
             self.call_here([&units](Reducer& r) { ReducerInternal(r).set_units(units); });
           })
      .def("set_shard_over", [](Handle& self, const std::string& text) {
        const ShardOver over = choose("shard_over", text, choices(ShardOver{}));
        self.call_here([over](Reducer& r) { ReducerInternal(r).set_shard_over(over); });
      });
  bound.def("prepare", [](Handle& self) { self.call([](Reducer& r) { r.prepare(); }); })
      .def("together",
           [](Handle& self, const std::string& what, const std::string& failure) {
             self.call([what, failure](Reducer& reducer) {
               ReducerInternal(reducer).together(what, [&] {
                 if (!failure.empty()) throw Error(failure);
               });
             });
           })
      .def("begin_step", [](Handle& self) { self.call([](Reducer& r) { r.begin_step(); }); })
      .def("begin_microbatch", begin_microbatch, py::arg("last"), py::arg("sync"),
           py::arg("has_batch") = py::none())
      .def("gradient_ready", &Handle::gradient_ready)
      .def("gradient_of", gradient_of)
      .def("reject_gradient",
           [](const Handle& self, const std::string& message) {
             self.reducer().reject_gradient(message);
           })
      .def("wait_packed", &Handle::wait_packed)
      .def("end_microbatch", &Handle::end_microbatch)
      .def("begin_window", begin_window, py::arg("last"), py::arg("backwards"),
           py::arg("accumulate"), py::arg("accumulate_dtype"), py::arg("has_batch") = py::none())
      .def("check_window",
           [](Handle& self) {
             self.call_here([](Reducer& reducer) { ReducerInternal(reducer).check_window(); });
           })
      .def("end_window", &Handle::end_window)
      .def("leave_window",
           [](Handle& self, const std::string& reason) {
             self.call(
                 [reason](Reducer& reducer) { ReducerInternal(reducer).leave_window(reason); });
           })
      .def("release_memory",
           [](Handle& self) { self.call([](Reducer& reducer) { reducer.release_memory(); }); })
      .def("abandon_step",
           [](Handle& self, const std::string& reason) {
             self.call([reason](Reducer& reducer) { reducer.abandon_step(reason); });
           })
      .def("finish", [](Handle& self) { self.call([](Reducer& reducer) { reducer.finish(); }); })
      .def("discard", [](Handle& self) { self.call([](Reducer& reducer) { reducer.discard(); }); })
      .def("close", [](Handle& self) { self.call([](Reducer& reducer) { reducer.close(); }); })
      .def("leave", &Handle::leave, py::arg("reason"), py::arg("grace_s"));
}

void bind_results(Class& bound) {
  bound.def("shard", shard)
      .def("partial_shard", partial_shard)
      .def("unused_parameters",
           [](Handle& self, const std::string& call) {
             return self.call([call](Reducer& reducer) { return reducer.unused_parameters(call); });
           })
      .def("failed",
           [](const Handle& self) {
             return self.reducer().state().phase == ReducerState::Phase::kFailed;
           })
      .def("local_sum", local_sum)
      .def("copy_of", copy_of)
      .def("slice", slice)
      .def("shard_slice",
           [](Handle& self, const std::string& name) {
             const Slice all = ReducerInternal(self.reducer()).shard_slice(name);
             return std::make_pair(all.offset, all.count);
           })
      .def("balance", balance)
      .def("gather_gradients", gather_gradients)
      .def("gather_parameters", gather_parameters)
      .def("grad_norm", &Handle::grad_norm)
      .def("found_inf",
           [](Handle& self) {
             return self.call([](Reducer& reducer) { return reducer.found_inf(); });
           })
      .def("found_inf_word", found_inf_word)
      .def("save_snapshot",
           [](Handle& self, const std::filesystem::path& path, std::int64_t step) {
             self.call([path, step](Reducer& reducer) { reducer.save_snapshot(path, step); });
           })
      .def("save_digest",
           [](Handle& self, const std::filesystem::path& folder, std::int64_t step) {
             self.call([folder, step](Reducer& reducer) { reducer.save_digest(folder, step); });
           })
      .def("flush", [](Handle& self) {
        self.call_alone([](Reducer& reducer) { reducer.flush_snapshots(); });
      });
}

}  // namespace

void bind_reducer(py::module_& module) {
  py::class_<ReplicaHop, std::shared_ptr<ReplicaHop>>(
      module, "ReplicaHop",
      "What the replica all-reduce does to a shard. A hop belongs to one Reducer,\n"
      "or to one `hsdp.torch.replica_hook`.")
      .def("describe", &ReplicaHop::describe, "Its options, as stats and snapshots say them.");
  py::class_<HeldBytes>(module, "HeldBytes");
  py::class_<RunningTrace>(module, "Trace")
      .def("write", &RunningTrace::write)
      .def("leave", &RunningTrace::leave);
  py::class_<Update>(module, "Update").def("close", &Update::close);
  Class bound(module, "Reducer");
  bind_settings(bound);
  bind_step(bound);
  bind_results(bound);
  module.def("clip_grad_norm", clip_together);
  module.def("hear_drops", hear_drops);
}

}  // namespace hsdp::python
