#include "hsdp/reducer/results.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"
#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::reducer {
namespace {

using Holds = StepLedger::Holds;

// In registration order.
std::vector<FullArray> sorted_arrays(const ParameterTable& parameters,
                                     std::span<const NamedArray> arrays, Device device,
                                     std::string_view call) {
  std::vector<FullArray> sorted =
      full_arrays(parameters.specs(), arrays, device, "reducer: " + std::string(call));
  std::ranges::sort(sorted, {}, &FullArray::parameter);
  return sorted;
}

}  // namespace

Results::Results(ParameterTable& parameters, Groups& groups, Steps& steps, MemoryCount memory)
    : parameters_(parameters), groups_(groups), steps_(steps), memory_(std::move(memory)) {}

Event Results::run(Scope scope, std::int64_t step, Task task) {
  Event done = steps_.frozen()->pipeline().run(
      {.scope = scope, .step = step, .after = steps_.caller().record()}, std::move(task));
  if (groups_.on_host()) return done;
  done = done.enqueued();
  if (done.complete()) done.wait();  // throws what went wrong
  steps_.caller().wait(done);
  return done;
}

void Results::run_now(Scope scope, Task task) {
  const Event done = run(scope, kNoStep, std::move(task));
  if (groups_.on_host()) await(done);
}

void Results::await(const Event& done) const {
  groups_.operations.await(done, [&] { done.wait(); });
}

std::int64_t Results::last_step() const { return steps_.ledger().counts().begun_steps - 1; }

// Counted anew after each step: ranks that differ in one, as it was dropped, agree in the next.
OperationPlace Results::next_place(OperationKind kind) {
  const std::int64_t step = last_step();
  const std::int64_t turn = step == last_place_.step ? last_place_.turn + 1 : 0;
  return last_place_ = {.kind = kind, .step = step, .turn = turn};
}

UsageError Results::no_result(std::string_view call) const {
  Message message{.where = "reducer: " + std::string(call),
                  .expected = "a finished step",
                  .got = "none",
                  .remedy = "run the microbatches of a step first"};
  if (steps_.ledger().pending()) {
    message.got = "one with microbatches pending";
    message.remedy = "end it with last=True or finish(), or read partial_shard()";
  } else if (const std::string by = steps_.dropped_by(); !by.empty()) {
    message.got = "one that was dropped by " + by;
    message.remedy = "begin a new step on every rank";
  }
  return UsageError(message);
}

void Results::expect_result(std::string_view call) {
  steps_.require_idle(call);
  if (groups_.on_host()) {
    steps_.check_usable(call);
  } else {
    steps_.wait_reduced();
  }
  if (steps_.ledger().holds() != Holds::kResult) throw no_result(call);
  steps_.note_read();
}

void Results::require_result(std::string_view call) {
  using Progress = StepResult::Progress;
  steps_.require_idle(call);
  if (Frozen* const frozen = steps_.frozen()) {
    frozen->pipeline().wait_launched();
    steps_.caller().wait(frozen->pipeline().done());
  }
  const bool holds = steps_.ledger().holds() == Holds::kResult;
  const Progress progress = steps_.result().progress;
  const bool stands = holds && progress != Progress::kRunning;
  // A GPU may still compute the result, from what a failed hop left.
  if (stands && progress == Progress::kAgreed) groups_.world.engine()->control().throw_if_failed();
  if (!stands) steps_.check_usable(call);
  if (steps_.ledger().holds() != Holds::kResult) throw no_result(call);
  steps_.note_read();
}

void Results::require_no_local_sums(std::string_view call) const {
  const std::vector<StepLedger::Group>& groups = steps_.ledger().groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].local_count > 0) {
      throw UsageError({.where = "reducer: " + std::string(call),
                        .expected = "reduced microbatches",
                        .got = "local sums (sync=\"none\") that were not reduced yet",
                        .remedy = "call finish() first"});
    }
    if (groups[g].has_total) {
      throw UsageError({.where = "reducer: " + std::string(call),
                        .expected = "one carry",
                        .got = "group '" + parameters_.group_name(static_cast<int>(g)) +
                               "' with a replica-summed total of this step",
                        .remedy = "call finish() first"});
    }
  }
}

TensorView Results::own_slice(int parameter) const {
  return steps_.frozen()->memory().slice_result(parameter);
}

TensorView Results::shard(int parameter) {
  require_result("shard");
  return own_slice(parameter);
}

std::vector<int> Results::unused_parameters(std::string_view call) {
  require_result(call);
  std::vector<int> unused;
  const std::string& present = steps_.result().present;
  for (std::size_t p = 0; p < present.size(); ++p) {
    if (present[p] == '0') unused.push_back(static_cast<int>(p));
  }
  return unused;
}

UsageError Results::no_partial(std::string_view call) {
  return UsageError({.where = "reducer: " + std::string(call),
                     .expected = "a finished step, as results are sharded over the mesh",
                     .got = "one with microbatches pending",
                     .remedy = "end it with last=True or finish(), or use shard_over=\"shard\""});
}

void Results::require_partial() {
  steps_.require_idle("partial_shard");
  if (groups_.parts > 1) throw no_partial("partial_shard");
  steps_.wait_reduced();
  if (!steps_.ledger().pending()) {
    throw UsageError({.where = "reducer: partial_shard",
                      .expected = "microbatches pending",
                      .got = "none",
                      .remedy = "read shard() after the step's last microbatch"});
  }
  require_no_local_sums("partial_shard");
}

void Results::partial_shard(int parameter, TensorView out) {
  require_partial();
  const TensorView sum = own_slice(parameter);
  require_output(out, sum.dtype, sum.count, "partial_shard");
  run_now(Scope::kThisRank, [&](Stream& stream) {
    kernels::ScaleAndCast args;
    args.in = sum.data;
    args.out = out.data;
    args.in_dtype = args.out_dtype = sum.dtype;
    args.count = sum.count;
    args.divisor = steps_.divide_factor() * steps_.ledger().loss_scale();
    kernels::scale_and_cast(args, stream);
  });
}

std::vector<float> Results::partial_shard(int parameter) {
  require_partial();
  std::vector<float> copy(static_cast<std::size_t>(own_slice(parameter).count));
  read({copy.data(), std::ssize(copy), Dtype::kF32, {}},
       [&](const TensorView& out) { partial_shard(parameter, out); });
  return copy;
}

TensorView Results::require_local_sum(int parameter) {
  steps_.check_usable("local_sum");
  if (Frozen* const frozen = steps_.frozen()) {
    if (const std::optional<TensorView> sum = frozen->collector().local_sum(parameter)) {
      steps_.caller().wait(frozen->collector().packed());
      return *sum;
    }
  }
  throw UsageError({.where = "reducer: local_sum",
                    .expected = "gradients of '" + parameters_.spec(parameter).name +
                                "' that are added up on this rank",
                    .got = "none",
                    .remedy = "read it inside of a window or between microbatches with "
                              "sync=\"none\"; with accumulate=\"grad\" the caller has the sums"});
}

void Results::local_sum(int parameter, TensorView out) {
  const TensorView sum = require_local_sum(parameter);
  require_output(out, sum_dtype(sum.dtype), sum.count, "local_sum");
  const StridedView flat{sum.data, sum.dtype, sum.device, {sum.count}, {}};
  kernels::CastAndPack args;
  args.gradient = &flat;
  args.count = sum.count;
  args.out = out.data;
  args.out_dtype = out.dtype;
  Stream& caller = steps_.caller();
  caller.run([&] { kernels::cast_and_pack(args, caller); });
}

std::vector<float> Results::local_sum(int parameter) {
  std::vector<float> copy(static_cast<std::size_t>(require_local_sum(parameter).count));
  read({copy.data(), std::ssize(copy), Dtype::kF32, {}},
       [&](const TensorView& out) { local_sum(parameter, out); });
  return copy;
}

void Results::read(const TensorView& out, const std::function<void(const TensorView&)>& compute) {
  if (groups_.on_host()) return compute(out);
  Stream& caller = steps_.caller();
  const Scratch on_device(out.size_in_bytes(), caller);
  compute(TensorView{on_device.data(), out.count, out.dtype, groups_.device});
  const Event computed = caller.record();
  computed.throw_if_failed();
  groups_.world.wait(computed);
  // Not before the wait: the copy blocks the host until the stream reaches it, and must not happen
  // after this call has thrown.
  copy_bytes(out.data, on_device.data(), out.size_in_bytes(), caller);
  caller.synchronize();
}

void Results::require_output(const TensorView& out, Dtype dtype, std::int64_t count,
                             std::string_view call) const {
  const bool has_memory = out.data != nullptr || count == 0;
  if (has_memory && out.count == count && out.dtype == dtype && out.device == groups_.device) {
    return;
  }
  const ConstTensorView wanted(nullptr, count, dtype, groups_.device);
  throw UsageError({.where = "reducer: " + std::string(call),
                    .expected = "an output of " + to_string(wanted),
                    .got = has_memory ? to_string(out) : "a null pointer"});
}

const BucketLayout& Results::layout() {
  if (const Frozen* const frozen = steps_.frozen()) return frozen->layout();
  return parameters_.early_layout(groups_.slice_count());
}

Slice Results::slice(int parameter) {
  return layout().slice(parameter, groups_.owner().slice_rank());
}

Slice Results::shard_slice(int parameter) {
  const RowCut shards = layout().slices(parameter).joined(groups_.parts);
  return {shards.begin(groups_.shard.rank()), shards.length(groups_.shard.rank())};
}

void Results::gather_gradients(std::span<const NamedArray> arrays) {
  const std::vector<FullArray> full =
      sorted_arrays(parameters_, arrays, groups_.device, "gather_gradients");
  for (const FullArray& target : full) {
    const ParameterSpec& spec = parameters_.spec(target.parameter);
    const bool is_wide = spec.dtype == Dtype::kF64;
    if (is_wide ? target.array.dtype == Dtype::kF64 : sums_in_f32(target.array.dtype)) continue;
    throw UsageError({.where = "reducer: gather_gradients: array of '" + spec.name + "'",
                      .expected = is_wide ? "f64, as its gradients" : "f32, bf16 or f16",
                      .got = std::string(name(target.array.dtype))});
  }
  require_result("gather_gradients");
  steps_.check_usable("gather_gradients");
  const OperationPlace place = next_place(OperationKind::kGather);
  run_now(Scope::kAllRanks, [&](Stream& stream) {
    const BucketLayout& layout = steps_.frozen()->layout();
    for (const FullArray& target : full) {
      const Slice own = layout.slice(target.parameter, groups_.owner().slice_rank());
      kernels::ScaleAndCast args;
      const TensorView result = own_slice(target.parameter);
      args.in = result.data;
      args.in_dtype = result.dtype;
      args.out = target.array.slice(own.offset, own.count).data;
      args.out_dtype = target.array.dtype;
      args.count = own.count;
      kernels::scale_and_cast(args, stream);
    }
    gather(full, place, stream);
  });
}

void Results::gather(const std::vector<FullArray>& arrays, const OperationPlace& place,
                     Stream& stream) {
  Operation operation(groups_.operations, place);
  all_gather_count_ += gather_slices(groups_, layout(), arrays, memory_, stream);
  if (!groups_.on_host()) operation.end(OperationState::kIssued);
}

void Results::gather_parameters(std::span<const NamedArray> arrays) {
  const std::vector<FullArray> full =
      sorted_arrays(parameters_, arrays, groups_.device, "gather_parameters");
  steps_.require_idle("gather_parameters");
  steps_.wait_reduced();
  if (steps_.frozen() == nullptr) {
    throw UsageError({.where = "reducer: gather_parameters",
                      .expected = "a step before it",
                      .got = "none",
                      .remedy = "run the microbatches of a step first"});
  }
  const OperationPlace place = next_place(OperationKind::kGather);
  run_now(Scope::kAllRanks, [&](Stream& stream) { gather(full, place, stream); });
}

void Results::require_ended_step(std::string_view call) {
  steps_.require_idle(call);
  if (!steps_.ledger().pending()) return steps_.note_read();
  steps_.check_usable(call);
  throw UsageError({.where = "reducer: " + std::string(call),
                    .expected = "a finished step",
                    .got = "one with microbatches pending",
                    .remedy = "ask after its last microbatch or finish()"});
}

bool Results::found_inf() {
  require_ended_step("found_inf");
  if (steps_.frozen() == nullptr) return false;
  if (steps_.ledger().holds() != Holds::kResult) {
    steps_.check_usable("found_inf");
    return false;
  }
  steps_.frozen()->pipeline().wait_ended();
  const bool known = steps_.result().progress == StepResult::Progress::kKnown;
  if (!known) steps_.check_usable("found_inf");
  return steps_.result().found_inf;
}

Event Results::found_inf(TensorView out) {
  require_output(out, Dtype::kF32, 1, "found_inf");
  require_ended_step("found_inf");
  if (groups_.on_host()) {
    steps_.check_usable("found_inf");
  } else {
    steps_.wait_reduced();
  }
  auto* const word = static_cast<float*>(out.data);
  if (steps_.ledger().holds() != Holds::kResult) {
    kernels::CastAndPack zero;  // without a gradient
    zero.count = 1;
    zero.out = word;
    zero.out_dtype = Dtype::kF32;
    kernels::cast_and_pack(zero, steps_.caller());
    return steps_.caller().record();
  }
  const auto indicate = [frozen = steps_.frozen(), &groups = groups_, out, word,
                         result = steps_.shared_result()](Stream& stream) {
    kernels::indicate(result->nonfinite.get(), word, stream);
    if (groups.on_host()) return;  // the flag is the whole world's there
    frozen->pipeline().hold(result->nonfinite);
    if (groups.world.size() == 1) return;
    if (groups.shard.size() > 1) groups.shard.all_reduce(out, stream);
    if (groups.replicate.size() > 1) groups.replicate.all_reduce(out, stream);
    kernels::indicate(word, word, stream);
  };
  return run(groups_.on_host() ? Scope::kThisRank : Scope::kAllRanks, last_step(), indicate);
}

}  // namespace hsdp::reducer
