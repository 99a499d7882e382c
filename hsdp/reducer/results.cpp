#include "hsdp/reducer/results.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/clip.h"
#include "hsdp/kernels/digest.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/reducer/together.h"

namespace hsdp::reducer {
namespace {

using Holds = StepLedger::Holds;

// torch's clip_grad_norm_ adds the same: a norm of exactly max_norm is scaled by a hair.
constexpr double kClipEpsilon = 1e-6;

// In registration order.
std::vector<FullArray> sorted_arrays(const ParameterTable& parameters,
                                     std::span<const NamedArray> arrays, Device device,
                                     std::string_view call) {
  std::vector<FullArray> sorted =
      full_arrays(parameters.specs(), arrays, device, "reducer: " + std::string(call));
  std::ranges::sort(sorted, {}, &FullArray::parameter);
  return sorted;
}

// Tasks may outlive the Results, but not what these work on.

// The sum of squares of the whole mean gradient: each parameter's slice has a word of its own, and
// the words are summed in their order, then those of the ranks.
void sum_squares(Frozen& frozen, Groups& groups, std::int64_t step, double* sum, Stream& stream) {
  Operation operation(groups.operations, {.kind = OperationKind::kNorm, .step = step});
  const int count = frozen.layout().parameter_count();
  const Scratch of_slices(static_cast<std::size_t>(count) * sizeof(double), stream);
  auto* const slots = reinterpret_cast<double*>(of_slices.data());
  std::vector<kernels::SquaredNorm> norms(static_cast<std::size_t>(count));
  for (int p = 0; p < count; ++p) {
    norms[static_cast<std::size_t>(p)] = {frozen.memory().slice_result(p), slots + p};
  }
  // A call takes values of one dtype.
  const auto wide = std::stable_partition(norms.begin(), norms.end(), [](const auto& norm) {
    return norm.values.dtype != Dtype::kF64;
  });
  kernels::squared_norms({norms.begin(), wide}, stream);
  kernels::squared_norms({wide, norms.end()}, stream);
  kernels::sum_in_order(slots, count, sum, stream);
  const TensorView of_rank{sum, 1, Dtype::kF64, stream.device()};
  if (groups.shard.size() > 1) groups.shard.all_reduce(of_rank, stream);
  if (groups.parts > 1) groups.replicate.all_reduce(of_rank, stream);
  if (!groups.on_host()) operation.end(OperationState::kIssued);
}

void scale_result(Frozen& frozen, const double* factor, Stream& stream) {
  for (int b = 0; b < std::ssize(frozen.layout().buckets()); ++b) {
    kernels::scale_by(frozen.memory().bucket_result(b), factor, stream);
  }
}

}  // namespace

Results::Results(const ReducerOptions& options, ParameterTable& parameters, Groups& groups,
                 Steps& steps, std::string snapshot_id, MemoryCount memory)
    : options_(options),
      parameters_(parameters),
      groups_(groups),
      steps_(steps),
      snapshot_id_(std::move(snapshot_id)),
      memory_(std::move(memory)),
      snapshots_(memory_) {}

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
  // A GPU may be about to compute it from what a failed hop left.
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

void Results::local_sum(int parameter, TensorView out) {
  const TensorView sum = steps_.local_sum(parameter);
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
  std::vector<float> copy(static_cast<std::size_t>(steps_.local_sum(parameter).count));
  read({copy.data(), std::ssize(copy), Dtype::kF32, {}},
       [&](const TensorView& out) { local_sum(parameter, out); });
  return copy;
}

// Lets `compute` write to memory of the device, and copies that to `out`, on the host.
template <typename Compute>
void Results::read(const TensorView& out, const Compute& compute) {
  if (groups_.on_host()) return compute(out);
  Stream& caller = steps_.caller();
  const Scratch on_device(out.size_in_bytes(), caller);
  compute(TensorView{on_device.data(), out.count, out.dtype, groups_.device});
  const Event computed = caller.record();
  computed.throw_if_failed();
  groups_.world.wait(computed);
  // Only now: a copy to such memory holds the host up until the stream has come there, and must not
  // come after this call has thrown.
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
    gather(full, stream);
  });
}

void Results::gather(const std::vector<FullArray>& arrays, Stream& stream) {
  Operation operation(groups_.operations, {.kind = OperationKind::kGather, .step = last_step()});
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
  run_now(Scope::kAllRanks, [&](Stream& stream) { gather(full, stream); });
}

Event Results::add_squares(std::shared_ptr<double> sum, std::vector<Event> after) {
  return run(Scope::kAllRanks, last_step(),
             [frozen = steps_.frozen(), &groups = groups_, step = last_step(), sum = std::move(sum),
              after = std::move(after)](Stream& stream) {
               stream.wait_in_task(after);
               sum_squares(*frozen, groups, step, sum.get(), stream);
             });
}

Event Results::grad_norm(TensorView out) {
  require_output(out, Dtype::kF64, 1, "grad_norm");
  expect_result("grad_norm");
  auto* const norm = static_cast<double*>(out.data);
  return run(
      Scope::kAllRanks, last_step(),
      [frozen = steps_.frozen(), &groups = groups_, step = last_step(), norm](Stream& stream) {
        sum_squares(*frozen, groups, step, norm, stream);
        kernels::clip_factor({.squares = norm, .count = 1, .norm = norm}, stream);
      });
}

double Results::grad_norm() {
  require_result("grad_norm");
  double norm = 0.0;
  read({&norm, 1, Dtype::kF64, {}}, [this](const TensorView& out) {
    const Event done = grad_norm(out);
    if (groups_.on_host()) await(done);
  });
  return norm;
}

Event Results::clip_factor(std::span<Results* const> all, double max_norm, TensorView norm,
                           TensorView factor, std::string_view call) {
  Results& first = *all.front();
  first.require_output(norm, Dtype::kF64, 1, call);
  const bool narrow = factor.dtype == Dtype::kF32;
  first.require_output(factor, narrow ? Dtype::kF32 : Dtype::kF64, 1, call);
  for (Results* results : all) {
    results->steps_.set_caller(first.steps_.caller());
    results->expect_result(call);
  }
  const auto words =
      std::make_shared<const Scratch>(all.size() * sizeof(double), first.steps_.caller());
  auto* const squares = reinterpret_cast<double*>(words->data());
  // Where a step of one of them is dropped, nobody begins a collective of another: the rank that
  // dropped it may not come to this clip at all.
  std::vector<Event> standing;
  for (Results* results : all) {
    standing.push_back(results->run(Scope::kThisRank, results->last_step(), [](Stream&) {}));
  }
  std::vector<Event> summed;
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Each keeps the words: where one fails, the last task does not wait for the others.
    summed.push_back(all[i]->add_squares({words, squares + i}, standing));
  }
  const kernels::ClipFactor clip{
      .squares = squares,
      .count = std::ssize(all),
      .max_norm = max_norm,
      .epsilon = kClipEpsilon,
      .norm = static_cast<double*>(norm.data),
      .factor = narrow ? nullptr : static_cast<double*>(factor.data),
      .narrow_factor = narrow ? static_cast<float*>(factor.data) : nullptr};
  return first.run(Scope::kThisRank, kNoStep, [summed, clip, words](Stream& stream) {
    stream.wait_in_task(summed);
    kernels::clip_factor(clip, stream);
  });
}

Event Results::clip_grad_norm(std::span<Results* const> all, double max_norm, TensorView norm) {
  Results& first = *all.front();
  const auto word = std::make_shared<const Scratch>(sizeof(double), first.steps_.caller());
  const TensorView factor{word->data(), 1, Dtype::kF64, first.groups_.device};
  const Event known = clip_factor(all, max_norm, norm, factor, "clip_grad_norm");
  std::vector<Event> scaled;
  for (Results* results : all) {
    const auto scale = [frozen = results->steps_.frozen(), known, word](Stream& stream) {
      stream.wait_in_task({&known, 1});
      scale_result(*frozen, reinterpret_cast<const double*>(word->data()), stream);
    };
    scaled.push_back(results->run(Scope::kThisRank, results->last_step(), scale));
  }
  if (scaled.size() == 1) return scaled.front();
  return first.run(Scope::kThisRank, kNoStep,
                   [scaled](Stream& stream) { stream.wait_in_task(scaled); });
}

double Results::clip_grad_norm(std::span<Results* const> all, double max_norm) {
  for (Results* results : all) results->require_result("clip_grad_norm");
  Results& first = *all.front();
  double norm = 0.0;
  first.read({&norm, 1, Dtype::kF64, {}}, [&](const TensorView& out) {
    const Event done = clip_grad_norm(all, max_norm, out);
    if (first.groups_.on_host()) first.await(done);
  });
  return norm;
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
    kernels::CastAndPack zero;  // of no gradient
    zero.count = 1;
    zero.out = word;
    zero.out_dtype = Dtype::kF32;
    kernels::cast_and_pack(zero, steps_.caller());
    return steps_.caller().record();
  }
  const auto indicate = [frozen = steps_.frozen(), &groups = groups_, out, word,
                         result = steps_.shared_result()](Stream& stream) {
    kernels::indicate(result->nonfinite.get(), word, stream);
    if (groups.on_host()) return;  // where the flag is the whole world's when the step has ended
    frozen->pipeline().hold(result->nonfinite);
    if (groups.world.size() == 1) return;
    if (groups.shard.size() > 1) groups.shard.all_reduce(out, stream);
    if (groups.replicate.size() > 1) groups.replicate.all_reduce(out, stream);
    kernels::indicate(word, word, stream);
  };
  return run(groups_.on_host() ? Scope::kThisRank : Scope::kAllRanks, last_step(), indicate);
}

// Of this shard rank's slices. They are the result's, but where each replica has its part: then
// copies of all parts, in memory that it returns.
std::vector<SnapshotEntry> Results::snapshot_entries(Buffer& copies) {
  std::vector<SnapshotEntry> entries;
  for (int p = 0; p < parameters_.size(); ++p) {
    const ParameterSpec& spec = parameters_.spec(p);
    entries.push_back({spec.name, spec.shape, spec.dtype, parameters_.wire_dtype(p),
                       shard_slice(p).offset, own_slice(p)});
  }
  if (groups_.parts > 1) copies = gather_replica_parts(entries);
  return entries;
}

Buffer Results::gather_replica_parts(std::vector<SnapshotEntry>& entries) {
  const BucketLayout& layout = steps_.frozen()->layout();
  std::vector<CutArray> slices;
  std::vector<FullArray> all;
  std::size_t size = 0;
  for (int p = 0; p < parameters_.size(); ++p) {
    const Dtype dtype = own_slice(p).dtype;
    slices.push_back(
        replica_parts(groups_.owner(), layout, p, {nullptr, 0, dtype, groups_.device}));
    slices.back().array.count = slices.back().cut.count();
    all.push_back({p, {nullptr, parameters_.count(p), dtype, groups_.device}});
    size += scratch_size(slices.back().array.size_in_bytes());
  }
  Buffer copies;
  together(groups_.world, "allocate whole slices for a snapshot",
           [&] { copies = Buffer(groups_.device, size); });
  std::byte* place = copies.data();
  for (CutArray& slice : slices) {
    slice.array.data = place;
    place += scratch_size(slice.array.size_in_bytes());
  }
  run_now(Scope::kAllRanks, [&](Stream& stream) {
    const int part = groups_.replicate.rank();
    for (const GatherUnit& unit : gather_units(layout, all, kGatherUnitBytes)) {
      std::vector<CutArray> together;
      for (const FullArray& one : unit) {
        const CutArray& slice =
            together.emplace_back(slices[static_cast<std::size_t>(one.parameter)]);
        const TensorView own = own_slice(one.parameter);
        copy_bytes(slice.array.slice(slice.cut.begin(part), own.count).data, own.data,
                   own.size_in_bytes(), stream);
      }
      all_gather_count_ += gather_arrays(groups_.replicate, together, memory_, stream);
    }
  });
  for (std::size_t p = 0; p < slices.size(); ++p) entries[p].data = slices[p].array;
  return copies;
}

// Points the entries at a copy of their data in the host's memory, which it returns.
std::vector<std::byte> Results::copy_to_host(std::vector<SnapshotEntry>& entries,
                                             std::vector<SnapshotState>& hop_state) {
  std::vector<ConstTensorView*> views;
  views.reserve(entries.size() + hop_state.size());
  for (SnapshotEntry& entry : entries) views.push_back(&entry.data);
  for (SnapshotState& array : hop_state) {
    if (array.data.device.type != DeviceType::kHost) views.push_back(&array.data);
  }
  std::size_t size = 0;
  for (const ConstTensorView* const view : views) size += view->size_in_bytes();
  std::vector<std::byte> copy(size);
  run_now(Scope::kThisRank, [&](Stream& stream) {
    std::byte* place = copy.data();
    for (ConstTensorView* const view : views) {
      copy_bytes(place, view->data, view->size_in_bytes(), stream);
      view->data = place;
      view->device = {};
      place += view->size_in_bytes();
    }
  });
  groups_.world.wait(steps_.caller().record());
  return copy;
}

void Results::save_snapshot(const std::filesystem::path& path, std::int64_t step) {
  const StepLedger& ledger = steps_.ledger();
  steps_.require_idle("save_snapshot");
  if (ledger.pending()) {
    if (groups_.parts > 1) throw no_partial("save_snapshot");
    steps_.wait_reduced();
    require_no_local_sums("save_snapshot");
  } else {
    require_result("save_snapshot");
  }
  SnapshotInfo info;
  info.id = snapshot_id_;
  info.reducer = options_.name;
  info.step = step;
  info.replicate_size = groups_.replicate.size();
  info.shard_size = groups_.shard.size();
  info.rank = groups_.world.rank();
  info.microbatch_count = ledger.microbatch();
  info.divide_factor = steps_.divide_factor();
  info.loss_scale = ledger.loss_scale();
  info.replica_dtype = options_.replica_dtype;
  info.quantizes = options_.replica_hop->quantizes();
  info.replica_hop = options_.replica_hop->describe();
  info.reduction = options_.reduction;
  info.layout = name(options_.layout);
  info.engine = groups_.world.engine_name();
  info.partial = ledger.pending();
  Buffer copies;
  std::vector<SnapshotEntry> entries = snapshot_entries(copies);
  std::vector<SnapshotState> hop_state;
  if (!info.partial) {
    for (const HopState& one : options_.replica_hop->state()) {
      hop_state.push_back({one.key, one.data});
    }
  }
  std::vector<std::byte> copy;
  if (!groups_.on_host()) copy = copy_to_host(entries, hop_state);
  snapshots_.submit(path, info, entries, hop_state);
}

void Results::save_digest(const std::filesystem::path& folder, std::int64_t step) {
  require_result("save_digest");
  DigestHeader header{options_.name, groups_.world.rank(), groups_.replicate.size(),
                      groups_.shard.size()};
  const auto count = static_cast<std::size_t>(parameters_.size());
  const Buffer pinned(groups_.device, count * sizeof(std::uint64_t), Buffer::Place::kPinnedHost);
  const std::span sums(reinterpret_cast<std::uint64_t*>(pinned.data()), count);
  run_now(Scope::kThisRank, [&](Stream& stream) {
    for (int p = 0; p < parameters_.size(); ++p) {
      const Slice own = slice(p);
      header.parts.push_back({parameters_.spec(p).name, own.offset, own.count});
      std::uint64_t& sum = sums[static_cast<std::size_t>(p)];
      sum = 0;
      kernels::add_digest(own_slice(p), 0, &sum, stream);
    }
  });
  if (!groups_.on_host()) groups_.world.wait(steps_.caller().record());
  if (!digests_ || digests_->folder() != folder) digests_.emplace(folder, header);
  digests_->append(step, sums);
}

}  // namespace hsdp::reducer
