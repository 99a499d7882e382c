// A Reducer as Python holds it: checks the process, lets no two calls in at a time that the library
// does not allow together, and keeps arrays alive for as long as it reads them.
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
  // For callers that know the array well: no conversion, no protocol. Of the registered shape and
  // dtype, which the view lacks. On a GPU the owner frees it in the order of the caller's stream,
  // and nobody overwrites the gradient before it is packed. `stream`: as CallerStream::now takes
  // it.
  void gradient_of(int parameter, StridedView gradient, pybind11::object owner,
                   dlpack::CurrentStream stream = nullptr);
  // A microbatch with sync="none" waits for nobody within a step: it begins and ends on the calling
  // thread, without the one that keeps this thread free for Ctrl-C. Only a fault in it would wait,
  // where the words of the microbatch before are still under way.
  void begin_microbatch(const MicrobatchOptions& options);
  void end_microbatch();
  void end_window(std::int64_t backwards);
  // Drops the step, writes the snapshots and closes the Reducer, on a rank that does not come back.
  // The disk may take its time. Peers that do not answer within the grace, as they wait for this
  // rank elsewhere, are not waited for: the mesh ends.
  void leave(const std::string& reason, double grace_s);
  // On a GPU: the caller's stream goes on after the gradients so far are packed.
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
  // The same for a task that waits for nobody.
  template <typename Task>
  auto call_here(Task task) {
    const InUse in_use(*this);
    settled_ = false;
    follow_caller();
    return call_released([this, &task] { return task(*reducer_); });
  }
  // For waits that concern no other rank: Ctrl-C leaves the task behind and the mesh alone.
  template <typename Task>
  auto call_alone(Task task) {
    const InUse in_use(*this);
    return call_interruptibly(
        [reducer = reducer_, task = std::move(task)]() mutable { return task(*reducer); });
  }
  // For calls that return at once.
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
  // One f64, where the mesh is.
  [[nodiscard]] Memory grad_norm();
  // What the Reducer has put there is there for whoever waits.
  void set_ready(Memory& memory) const { memory.set_ready(caller_event(), world_); }
  // Keeps something for as long as this.
  void keep(std::shared_ptr<const void> object) { kept_.push_back(std::move(object)); }
  [[nodiscard]] CallerStream& caller() const { return *caller_; }
  [[nodiscard]] std::shared_ptr<CallerStream> share_caller() const { return caller_; }
  [[nodiscard]] const Interrupt& interrupt() const { return interrupt_; }

 private:
  // Within a step a local microbatch waits for nobody, nor does one that only delimits in a window.
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
  // The Reducer works beside the stream that is the caller's now.
  void follow_caller();
  [[nodiscard]] Event caller_event() const;

  OwnProcess process_;
  std::vector<std::shared_ptr<const void>> kept_;  // outlives the Reducer
  std::shared_ptr<Reducer> reducer_;
  Communicator world_;
  Interrupt interrupt_;
  std::shared_ptr<CallerStream> caller_;
  std::atomic<bool> overwritable_{false};  // a gradient of the open microbatch may be written to
  bool in_use_ = false;                    // guarded by the GIL, as are:
  bool open_is_local_ = false;             // the last microbatch that began
  bool settled_ = false;    // the result stands, and nothing was called since that could change it
  pybind11::dict indices_;  // by name
  std::vector<std::string> titles_;  // of the parameters' gradients, in errors
};

}  // namespace hsdp::python
