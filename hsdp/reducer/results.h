// Reads a Reducer's results and partials: shards, full gradients, found_inf; and what norms and
// files need for that. Computations run on the Reducer's lane, after everything it has launched.
//
// Forms that write to memory return an Event. On the host they wait for nothing; the Event throws
// if the step was dropped or the world failed. On a GPU they wait for the status words and throw
// themselves; the Event is the device's, and the caller's stream waits for it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/slice_gather.h"
#include "hsdp/reducer/steps.h"

namespace hsdp::reducer {

class Results {
 public:
  using Task = std::function<void(Stream&)>;
  using Scope = Lane::Scope;

  // All of these outlive it.
  Results(ParameterTable& parameters, Groups& groups, Steps& steps, MemoryCount memory);

  [[nodiscard]] std::vector<int> unused_parameters(std::string_view call);
  [[nodiscard]] TensorView shard(int parameter);
  [[nodiscard]] std::vector<float> partial_shard(int parameter);
  void partial_shard(int parameter, TensorView out);
  [[nodiscard]] std::vector<float> local_sum(int parameter);
  void local_sum(int parameter, TensorView out);
  [[nodiscard]] Slice slice(int parameter);
  [[nodiscard]] Slice shard_slice(int parameter);
  [[nodiscard]] const BucketLayout& layout();
  void gather_gradients(std::span<const NamedArray> arrays);
  void gather_parameters(std::span<const NamedArray> arrays);
  [[nodiscard]] bool found_inf();
  Event found_inf(TensorView out);

  // For norms and files.
  [[nodiscard]] Groups& groups() const { return groups_; }
  [[nodiscard]] Steps& steps() const { return steps_; }
  [[nodiscard]] std::int64_t last_step() const;
  // For the record: the next norm or gather after the last step.
  [[nodiscard]] OperationPlace next_place(OperationKind kind);
  // This rank's slice of the result or partial.
  [[nodiscard]] TensorView own_slice(int parameter) const;
  // Runs the task on the lane, after the caller's stream so far and, on a GPU, before its later
  // work.
  Event run(Scope scope, std::int64_t step, Task task);
  void run_now(Scope scope, Task task);  // the same; on the host it waits for the task
  void await(const Event& done) const;   // blocks the caller's thread
  // Lets `compute` write to memory of the device, and copies that to `out`, on the host.
  void read(const TensorView& out, const std::function<void(const TensorView&)>& compute);
  // Waits for the step's result. After a failure the last finished result stays readable.
  void require_result(std::string_view call);
  // UsageError unless there is a result, or will be once the words are in. On a GPU waits for them.
  void expect_result(std::string_view call);
  void require_no_local_sums(std::string_view call) const;
  // UsageError unless a result of `count` elements may be written to `out`.
  void require_output(const TensorView& out, Dtype dtype, std::int64_t count,
                      std::string_view call) const;
  [[nodiscard]] static UsageError no_partial(std::string_view call);

  void count_all_gathers(std::int64_t count) { all_gather_count_ += count; }
  [[nodiscard]] std::int64_t all_gather_count() const { return all_gather_count_; }

 private:
  // In a task.
  void gather(const std::vector<FullArray>& arrays, const OperationPlace& place, Stream& stream);
  [[nodiscard]] UsageError no_result(std::string_view call) const;
  void require_ended_step(std::string_view call);
  void require_partial();
  // The parameter's local sum, valid on the caller's stream. UsageError if there is none.
  [[nodiscard]] TensorView require_local_sum(int parameter);

  ParameterTable& parameters_;
  Groups& groups_;
  Steps& steps_;
  std::int64_t all_gather_count_ = 0;
  OperationPlace last_place_{};
  MemoryCount memory_;
};

}  // namespace hsdp::reducer
