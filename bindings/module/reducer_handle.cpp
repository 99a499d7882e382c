#include "bindings/module/reducer_handle.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <stop_token>
#include <system_error>
#include <thread>

#include "bindings/module/held_object.h"
#include "bindings/module/text_argument.h"
#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

// From this size on, a copy takes so long that other Python threads should run meanwhile.
constexpr std::int64_t kReleasesGilFromBytes = 16 << 10;

// nullptr: the library reports that there is none.
const ParameterSpec* find_spec(const Reducer& reducer, const std::string& name) {
  const auto found = std::ranges::find(reducer.parameters(), name, &ParameterSpec::name);
  return found == reducer.parameters().end() ? nullptr : &*found;
}

Dtype sums_of(const Reducer& reducer, const std::string& name) {
  const ParameterSpec* const spec = find_spec(reducer, name);
  return spec == nullptr ? Dtype::kF32 : sum_dtype(spec->dtype);
}

}  // namespace

ReducerHandle::InUse::InUse(ReducerHandle& handle) : handle_(handle) {
  handle.process_.require("reducer");
  if (handle.in_use_) {
    throw UsageError({.where = "reducer",
                      .expected = "one call at a time",
                      .got = "one while another thread, or the code that a signal handler "
                             "interrupted, is in one",
                      .remedy = "call only gradient_ready from several threads"});
  }
  handle.in_use_ = true;
}

ReducerHandle::ReducerHandle(const MeshHandle& mesh, ReducerOptions options)
    : world_(mesh.mesh().world()), interrupt_(mesh.interrupt()), caller_(mesh.caller()) {
  reducer_ = call_interruptibly(
      [mesh = mesh.mesh(), options = std::move(options)]() mutable {
        return make_owned_by_process(Reducer(mesh, std::move(options)));
      },
      interrupt_);
}

int ReducerHandle::register_parameter(const ParameterSpec& spec) {
  const int index = reducer().register_parameter(spec);
  indices_[py::str(spec.name)] = index;
  titles_.push_back("reducer: gradient of '" + spec.name + "'");
  return index;
}

// The library rejects an index that is out of range.
int ReducerHandle::index_of(py::handle key) {
  if (PyObject* const found = PyDict_GetItemWithError(indices_.ptr(), key.ptr())) {
    return static_cast<int>(PyLong_AsLong(found));
  }
  PyErr_Clear();  // an unhashable key
  if (PyLong_Check(key.ptr()) != 0) {
    int overflow = 0;
    const long index = PyLong_AsLongAndOverflow(key.ptr(), &overflow);
    return overflow != 0 || index < 0 ? -1 : static_cast<int>(std::min(index, 1L << 30));
  }
  if (PyUnicode_Check(key.ptr()) == 0) {
    throw UsageError({.where = "reducer: gradient_ready",
                      .expected = "a parameter's name or index",
                      .got = "an object of type " + type_name(key)});
  }
  throw UsageError({.where = "reducer: gradient_ready",
                    .expected = "a registered parameter",
                    .got = "'" + text_argument(key, "reducer: gradient_ready: name") + "'",
                    .remedy = "register it before the first microbatch"});
}

void ReducerHandle::gradient_ready(py::handle key, py::handle gradient) {
  process_.require("reducer");
  int parameter = 0;
  ArrayArgument argument;
  try {
    parameter = index_of(key);
    const auto place = static_cast<std::size_t>(parameter);
    const bool is_known = place < titles_.size();
    argument =
        array_argument(gradient, is_known ? std::string_view(titles_[place]) : "reducer: gradient",
                       *caller_, complex_of(is_known && reducer_->parameters()[place].is_complex));
  } catch (const UsageError& error) {
    reducer_->reject_gradient(error.what());
    throw;
  }
  overwritable_ = true;
  hand_over(parameter, std::move(argument), KeptUntil::kRead, nullptr);
}

void ReducerHandle::gradient_of(int parameter, StridedView gradient, py::object owner,
                                dlpack::CurrentStream stream) {
  process_.require("reducer");
  const ParameterSpec& spec = reducer_->parameters().at(static_cast<std::size_t>(parameter));
  gradient.dtype = spec.dtype;
  gradient.shape = spec.shape;
  gradient.device = caller_->device();
  hand_over(parameter, {std::move(gradient), false, std::move(owner)}, KeptUntil::kOrdered, stream);
}

void ReducerHandle::hand_over(int parameter, ArrayArgument argument, KeptUntil until,
                              dlpack::CurrentStream stream) {
  std::shared_ptr<const void> keep_alive = hold(std::move(argument.owner));
  const ValidAfter valid =
      caller_->on_host() ? ValidAfter(Event()) : ValidAfter(caller_->now(stream));
  const std::int64_t bytes =
      argument.view.count() * static_cast<std::int64_t>(size_bytes(argument.view.dtype));
  if (bytes < kReleasesGilFromBytes) {
    reducer_->gradient_ready(parameter, std::move(argument.view), std::move(keep_alive), valid,
                             until);
  } else {
    const py::gil_scoped_release released;
    reducer_->gradient_ready(parameter, std::move(argument.view), std::move(keep_alive), valid,
                             until);
  }
  release_held();
}

bool ReducerHandle::may_stay_here(bool is_local) const {
  const ReducerState state = reducer().state();
  if (state.window_open) return true;
  return is_local && state.step_begun && !state.word_under_way;
}

void ReducerHandle::begin_microbatch(const MicrobatchOptions& options) {
  const auto begin = [options](Reducer& its) { its.begin_microbatch(options); };
  const bool is_local = options.sync == Sync::kNone;
  if (may_stay_here(is_local)) {
    call_here(begin);
  } else {
    call(begin);
  }
  if (!reducer().state().window_open) open_is_local_ = is_local;
}

void ReducerHandle::end_microbatch() {
  const auto end = [](Reducer& its) { its.end_microbatch(); };
  if (may_stay_here(open_is_local_)) {
    call_here(end);
  } else {
    call(end);
  }
  if (overwritable_.exchange(false)) wait_packed();
}

void ReducerHandle::end_window(std::int64_t backwards) {
  call([backwards](Reducer& its) { its.end_window(backwards); });
  if (overwritable_.exchange(false)) wait_packed();
}

void ReducerHandle::leave(const std::string& reason, double grace_s) {
  const auto end_in_time = [&](const std::stop_token& over) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any changed;
    changed.wait_for(lock, over, std::chrono::duration<double>(grace_s), [] { return false; });
    if (!over.stop_requested()) interrupt_(reason);
  };
  const auto call_within_grace = [&](auto task) {
    std::jthread timer;
    try {
      const AllSignalsBlocked blocked;
      timer = std::jthread(end_in_time);
    } catch (const std::system_error&) {  // no more threads: the mesh's timeout is then the bound
    }
    call(std::move(task));
  };
  call_within_grace([reason](Reducer& reducer) { reducer.abandon_step(reason); });
  std::exception_ptr lost_snapshot;
  try {
    call_alone([](Reducer& reducer) { reducer.flush_snapshots(); });
  } catch (const Error&) {
    lost_snapshot = std::current_exception();
  }
  call_within_grace([](Reducer& reducer) { reducer.close(); });
  if (lost_snapshot) std::rethrow_exception(lost_snapshot);
}

void ReducerHandle::wait_packed() {
  if (!caller_->on_host()) caller_->now().wait(reducer().packed());
}

void ReducerHandle::follow_caller() {
  if (!caller_->on_host()) reducer_->set_stream(caller_->now());
}

Event ReducerHandle::caller_event() const {
  return caller_->on_host() ? Event() : caller_->now().record();
}

Memory ReducerHandle::shard(const std::string& name) {
  TensorView view;
  if (settled_) {
    const InUse in_use(*this);
    follow_caller();
    view = reducer_->shard(name);
  } else {
    view = call([name](Reducer& reducer) { return reducer.shard(name); });
    settled_ = true;
  }
  return {view, {view.count}, reducer_, caller_event()};
}

Memory ReducerHandle::partial_shard(const std::string& name) {
  Memory memory =
      Memory::create(reducer().slice(name).count, sums_of(reducer(), name), caller_->now());
  call([name, memory](Reducer& reducer) { reducer.partial_shard(name, memory.view()); });
  set_ready(memory);
  return memory;
}

Memory ReducerHandle::local_sum(const std::string& name) {
  const ParameterSpec* const spec = find_spec(reducer(), name);
  const Shape shape = spec == nullptr ? Shape{} : spec->shape;
  const Memory memory =
      Memory::create(element_count(shape), sums_of(reducer(), name), caller_->now());
  call([name, memory](Reducer& reducer) { reducer.local_sum(name, memory.view()); });
  return {memory.view(), shape, std::make_shared<Memory>(memory), caller_event()};
}

Memory ReducerHandle::grad_norm() {
  Memory memory = Memory::create(1, Dtype::kF64, caller_->now());
  call([out = memory.view(), memory](Reducer& reducer) {
    if (out.device.type == DeviceType::kHost) {
      *static_cast<double*>(out.data) = reducer.grad_norm();
    } else {
      reducer.grad_norm(out);
    }
  });
  set_ready(memory);
  return memory;
}

}  // namespace hsdp::python
