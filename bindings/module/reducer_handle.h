// A Reducer for Python: checks the process, excludes concurrent calls that the library does not
// allow, and keeps arrays alive while it reads them.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/module/array_argument.h"
#include "bindings/module/interruptible_call.h"
#include "bindings/module/memory.h"
#include "bindings/module/mesh_handle.h"
#include "bindings/module/own_process.h"
#include "hsdp/reducer.h"

namespace hsdp::python {

class ReducerHandle {
 public:
  ReducerHandle(const MeshHandle& mesh, ReducerOptions options);

  int register_parameter(const ParameterSpec& spec);
  // `key`: a name or an index.
  void gradient_ready(pybind11::handle key, pybind11::handle gradient);
  // For callers that know the array: no conversion, no protocol. It has the registered shape and
  // dtype, which the view lacks. On a GPU the owner frees it in the order of the caller's stream,
  // and must not overwrite the gradient before it is packed. For `stream` see CallerStream::now.
  void gradient_of(int parameter, StridedView gradient, pybind11::object owner,
                   dlpack::CurrentStream stream = nullptr);
  // Within a step, a microbatch with sync="none" waits for no rank, so it begins and ends on the
  // calling thread, without the thread that keeps Ctrl-C working. It only waits after an error, if
  // the words of the previous microbatch are still in flight.
  void begin_microbatch(const MicrobatchOptions& options);
  void end_microbatch();
  void end_window(std::int64_t backwards);
  // Drops the step, writes the snapshots and closes the Reducer, on a rank that will not return.
  // Writing may take any time. If peers do not answer within the grace period, because they wait
  // for this rank elsewhere, the mesh ends.
  void leave(const std::string& reason, double grace_s);
  // On a GPU: makes the caller's stream wait until the gradients so far are packed.
  void wait_packed();

  // Runs `task(reducer)`, which may wait, with the GIL released; one at a time.
  template <typename Task>
  auto call(Task task) {
    const InUse in_use(*this);
    settled_ = false;
    follow_caller();
    return call_interruptibly(
        [reducer = reducer_, task = std::move(task)]() mutable { return task(*reducer); },
        interrupt_);
  }
  // The same for a task that never waits for other ranks.
  template <typename Task>
  auto call_here(Task task) {
    const InUse in_use(*this);
    settled_ = false;
    follow_caller();
    return call_released([this, &task] { return task(*reducer_); });
  }
  // For waits that concern no other rank: Ctrl-C abandons the task and does not affect the mesh.
  template <typename Task>
  auto call_alone(Task task) {
    const InUse in_use(*this);
    return call_interruptibly(
        [reducer = reducer_, task = std::move(task)]() mutable { return task(*reducer); });
  }
  // For calls that return immediately.
  [[nodiscard]] Reducer& reducer() const {
    process_.require("reducer");
    return *reducer_;
  }
  [[nodiscard]] std::shared_ptr<Reducer> share() const {
    process_.require("reducer");
    return reducer_;
  }
  // This rank's slice of the result; keeps the Reducer's memory alive.
  [[nodiscard]] Memory shard(const std::string& name);
  [[nodiscard]] Memory partial_shard(const std::string& name);
  [[nodiscard]] Memory local_sum(const std::string& name);
  // One f64 on the mesh's device.
  [[nodiscard]] Memory grad_norm();
  // Makes readers of `memory` wait for what the Reducer has written there.
  void set_ready(Memory& memory) const { memory.set_ready(caller_event(), world_); }
  // Keeps `object` alive as long as this handle.
  void keep(std::shared_ptr<const void> object) { kept_.push_back(std::move(object)); }
  [[nodiscard]] CallerStream& caller() const { return *caller_; }
  [[nodiscard]] std::shared_ptr<CallerStream> share_caller() const { return caller_; }
  [[nodiscard]] const Interrupt& interrupt() const { return interrupt_; }

 private:
  // Within a step, a local microbatch waits for no rank, nor does one that only delimits a pass.
  [[nodiscard]] bool may_stay_here(bool is_local) const;

  class InUse {
   public:
    explicit InUse(ReducerHandle& handle);
    ~InUse() { handle_.in_use_ = false; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    ReducerHandle& handle_;
  };

  [[nodiscard]] int index_of(pybind11::handle key);
  void hand_over(int parameter, ArrayArgument argument, KeptUntil until,
                 dlpack::CurrentStream stream);
  // Makes the Reducer follow the caller's current stream.
  void follow_caller();
  [[nodiscard]] Event caller_event() const;

  OwnProcess process_;
  std::vector<std::shared_ptr<const void>> kept_;  // must outlive the Reducer
  std::shared_ptr<Reducer> reducer_;
  Communicator world_;
  Interrupt interrupt_;
  std::shared_ptr<CallerStream> caller_;
  std::atomic<bool> overwritable_{false};  // a gradient of the open microbatch may be written to
  bool in_use_ = false;                    // guarded by the GIL, like the following:
  bool open_is_local_ = false;             // the last microbatch that began
  bool settled_ = false;                   // the result is final, and no later call could change it
  pybind11::dict indices_;                 // by name
  std::vector<std::string> titles_;        // what errors call the parameters' gradients
};

}  // namespace hsdp::python
