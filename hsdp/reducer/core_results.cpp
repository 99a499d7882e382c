// Reading a result or a partial: shards, full gradients, norms, snapshots.
#include <algorithm>

#include "hsdp/comm/engine.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/kernels/indicate.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/reducer/core.h"
#include "hsdp/reducer/slice_gather.h"

namespace hsdp {

// Waits for the words; on a GPU the caller's stream, not the caller, waits for the rest.
void Reducer::Core::wait_idle() {
  if (frozen_) {
    wait_for_words();
    frozen_->pipeline().wait_launched();
    caller_.wait(frozen_->pipeline().done());
  }
  check_usable("a result");
}

// After what the caller's stream did so far, and before what it does next.
void Reducer::Core::run_on_device(const std::function<void(Stream&)>& task, Scope scope) {
  frozen_->pipeline().run_now(scope, [&](Stream& stream) {
    stream.wait(caller_.record());
    task(stream);
  });
  caller_.wait(frozen_->pipeline().done());
}

// What ended an open microbatch, or the Reducer, matters more than that it is open or closed.
void Reducer::Core::require_idle(std::string_view call) {
  if (ledger_.phase() == Phase::kIdle) return;
  check_usable(call);
  ledger_.require_idle(call);
}

// Waits for the step's result. After a failure the last finished result stays readable.
void Reducer::Core::require_result(std::string_view call) {
  require_idle(call);
  if (frozen_) {
    frozen_->pipeline().wait_launched();
    caller_.wait(frozen_->pipeline().done());
  }
  const bool stands = ledger_.holds() == Holds::kResult &&
                      result_->progress != reducer::StepResult::Progress::kRunning;
  // A GPU may be about to compute it from what a failed hop left.
  if (stands && result_->progress == reducer::StepResult::Progress::kAgreed) {
    world_.engine()->control().throw_if_failed();
  }
  if (!stands) check_usable(call);
  if (ledger_.holds() == Holds::kResult) return;
  throw UsageError("reducer: " + std::string(call) +
                   (ledger_.pending()
                        ? ": expected a finished step, got one with microbatches pending; "
                          "end it with last = true or finish(), or read partial_shard()"
                        : ": expected a finished step, got none; run the microbatches of a "
                          "step first"));
}

void Reducer::Core::require_no_local_sums(std::string_view call) const {
  for (std::size_t g = 0; g < ledger_.groups().size(); ++g) {
    if (ledger_.groups()[g].local_count > 0) {
      throw UsageError("reducer: " + std::string(call) +
                       ": expected reduced microbatches, got local sums (sync = none) that were "
                       "not reduced yet; call finish() first");
    }
    if (ledger_.groups()[g].has_total) {
      throw UsageError("reducer: " + std::string(call) + ": expected one carry, got group '" +
                       parameters_.group_name(static_cast<int>(g)) +
                       "' with a replica-summed total of this step; call finish() first");
    }
  }
}

TensorView Reducer::Core::shard(int parameter) {
  require_result("shard");
  return frozen_->memory().carry(frozen_->layout().slice(parameter, mesh_.shard_rank()));
}

void Reducer::Core::require_partial() {
  require_idle("partial_shard");
  wait_idle();
  if (!ledger_.pending()) {
    throw UsageError(
        "reducer: partial_shard: expected microbatches pending, got none; read shard() after the "
        "step's last microbatch");
  }
  require_no_local_sums("partial_shard");
}

void Reducer::Core::partial_shard(int parameter, TensorView out) {
  require_partial();
  const TensorView carry =
      frozen_->memory().carry(frozen_->layout().slice(parameter, mesh_.shard_rank()));
  require_output(out, Dtype::kF32, carry.count, "partial_shard");
  run_on_device([&](Stream& stream) {
    kernels::ScaleAndCast args;
    args.in = carry.data;
    args.out = out.data;
    args.count = carry.count;
    args.divisor = fp32_divisor(ledger_.divide_factor(), ledger_.loss_scale());
    kernels::scale_and_cast(args, stream);
  });
}

std::vector<float> Reducer::Core::partial_shard(int parameter) {
  require_partial();
  const TensorView carry =
      frozen_->memory().carry(frozen_->layout().slice(parameter, mesh_.shard_rank()));
  std::vector<float> copy(static_cast<std::size_t>(carry.count));
  TensorView out{copy.data(), carry.count, Dtype::kF32, {}};
  if (carry.device == Device{}) {
    partial_shard(parameter, out);
    return copy;
  }
  const Scratch on_device(carry.size_in_bytes(), caller_);
  out = {on_device.data(), carry.count, Dtype::kF32, carry.device};
  partial_shard(parameter, out);
  copy_bytes(copy.data(), out.data, out.size_in_bytes(), caller_);
  world_.wait(caller_.record());
  return copy;
}

void Reducer::Core::require_output(const TensorView& out, Dtype dtype, std::int64_t count,
                                   std::string_view call) const {
  const bool has_memory = out.data != nullptr || count == 0;
  if (has_memory && out.count == count && out.dtype == dtype && out.device == mesh_.device()) {
    return;
  }
  throw UsageError("reducer: " + std::string(call) + ": expected an output of " +
                   std::to_string(count) + " " + std::string(name(dtype)) + " on " +
                   to_string(mesh_.device()) + ", got " +
                   (has_memory ? std::to_string(out.count) + " " + std::string(name(out.dtype)) +
                                     " on " + to_string(out.device)
                               : "a null pointer"));
}

Slice Reducer::Core::slice(int parameter) {
  const BucketLayout& layout =
      frozen_
          ? frozen_->layout()
          : parameters_.early_layout(mesh_.shard_size(), options_.layout, *options_.bucket_bytes);
  const ShardSlice& own = layout.slice(parameter, mesh_.shard_rank());
  return {own.flat_offset, own.count};
}

namespace {

// The arrays in registration order, checked against the parameters.
std::vector<reducer::FullArray> full_arrays(const reducer::ParameterTable& parameters,
                                            std::span<const NamedArray> arrays, Device device,
                                            std::string_view call) {
  std::vector<reducer::FullArray> result;
  for (const NamedArray& named : arrays) {
    const int parameter = parameters.find(named.name);
    if (named.array.data == nullptr && named.array.count > 0) {
      throw UsageError("reducer: " + std::string(call) + ": array of '" + named.name +
                       "': expected memory, got a null pointer");
    }
    if (named.array.count != parameters.count(parameter)) {
      throw UsageError("reducer: " + std::string(call) + ": array of '" + named.name +
                       "': expected " + std::to_string(parameters.count(parameter)) +
                       " elements, got " + std::to_string(named.array.count));
    }
    if (named.array.device != device) {
      throw UsageError("reducer: " + std::string(call) + ": array of '" + named.name +
                       "': expected memory on " + to_string(device) + ", the mesh's device, got " +
                       to_string(named.array.device));
    }
    result.push_back({parameter, named.array});
  }
  std::ranges::sort(result, {}, &reducer::FullArray::parameter);
  const auto twice = std::ranges::adjacent_find(result, {}, &reducer::FullArray::parameter);
  if (twice != result.end()) {
    throw UsageError("reducer: " + std::string(call) + ": expected every parameter once, got '" +
                     parameters.spec(twice->parameter).name + "' twice");
  }
  return result;
}

// The wire of the replica hop where it is that of the shard hop. A parameter's own is the coarser
// of this and its reduce dtype, so of several it is the finest.
Dtype finest_wire(std::span<const Bucket> buckets) {
  for (const Dtype wire : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    const auto has_it = [wire](const Bucket& bucket) { return bucket.wire_dtype == wire; };
    if (std::any_of(buckets.begin(), buckets.end(), has_it)) return wire;
  }
  return Dtype::kF32;
}

}  // namespace

void Reducer::Core::gather_gradients(std::span<const NamedArray> arrays) {
  const std::vector<reducer::FullArray> full =
      full_arrays(parameters_, arrays, mesh_.device(), "gather_gradients");
  for (const NamedArray& named : arrays) {
    if (!is_gradient_dtype(named.array.dtype)) {
      throw UsageError("reducer: gather_gradients: array of '" + named.name +
                       "': expected f32, bf16 or f16, got " + std::string(name(named.array.dtype)));
    }
  }
  require_result("gather_gradients");
  check_usable("gather_gradients");
  run_on_device(
      [&](Stream& stream) {
        for (const reducer::FullArray& target : full) {
          const ShardSlice& own = frozen_->layout().slice(target.parameter, mesh_.shard_rank());
          kernels::ScaleAndCast args;
          args.in = frozen_->memory().carry(own).data;
          args.out = target.array.slice(own.flat_offset, own.count).data;
          args.out_dtype = target.array.dtype;
          args.count = own.count;
          kernels::scale_and_cast(args, stream);
        }
        all_gather_count_ += reducer::gather_slices(shard_group_, frozen_->layout(), full, stream);
      },
      Scope::kAllRanks);
}

void Reducer::Core::gather_parameters(std::span<const NamedArray> arrays) {
  const std::vector<reducer::FullArray> full =
      full_arrays(parameters_, arrays, mesh_.device(), "gather_parameters");
  require_idle("gather_parameters");
  wait_idle();
  if (!frozen_) {
    throw UsageError(
        "reducer: gather_parameters: expected a step before it, got none; run one first");
  }
  run_on_device(
      [&](Stream& stream) {
        all_gather_count_ += reducer::gather_slices(shard_group_, frozen_->layout(), full, stream);
      },
      Scope::kAllRanks);
}

void Reducer::Core::require_step_over(std::string_view call) {
  require_idle(call);
  if (!ledger_.pending()) return;
  check_usable(call);
  throw UsageError("reducer: " + std::string(call) +
                   ": expected a finished step, got one with microbatches pending; ask after its "
                   "last microbatch or finish()");
}

bool Reducer::Core::found_inf() {
  require_step_over("found_inf");
  if (!frozen_) return false;
  if (ledger_.holds() != Holds::kResult) {
    check_usable("found_inf");
    return false;
  }
  frozen_->pipeline().wait_ended();
  const bool known = result_->progress == reducer::StepResult::Progress::kKnown;
  if (!known) check_usable("found_inf");
  return result_->found_inf;
}

// On a GPU in stream order: the flag is final when the shard stream has joined the replicas'.
void Reducer::Core::found_inf(TensorView out) {
  require_output(out, Dtype::kF32, 1, "found_inf");
  if (mesh_.device().type == DeviceType::kHost) {
    *static_cast<float*>(out.data) = found_inf() ? 1.0F : 0.0F;
    return;
  }
  require_step_over("found_inf");
  if (!frozen_) {
    throw UsageError("reducer: found_inf: expected a step before it, got none; run one first");
  }
  wait_idle();
  run_on_device(
      [&](Stream& stream) {
        auto* const word = static_cast<float*>(out.data);
        kernels::indicate(result_->nonfinite.get(), word, stream);
        frozen_->pipeline().hold(result_->nonfinite);
        if (mesh_.size() == 1) return;
        if (shard_group_.size() > 1) shard_group_.all_reduce(out, stream);
        if (replicate_group_.size() > 1) replicate_group_.all_reduce(out, stream);
        kernels::indicate(word, word, stream);
      },
      Scope::kAllRanks);
}

std::vector<SnapshotEntry> Reducer::Core::snapshot_entries() const {
  std::vector<SnapshotEntry> entries;
  for (int p = 0; p < parameters_.size(); ++p) {
    const ParameterSpec& spec = parameters_.spec(p);
    const ShardSlice& own = frozen_->layout().slice(p, mesh_.shard_rank());
    entries.push_back({spec.name, spec.shape, spec.dtype, parameters_.wire_dtype(p),
                       own.flat_offset, frozen_->memory().carry(own)});
  }
  return entries;
}

// Points the entries at a copy of their data in the host's memory, which it returns.
std::vector<std::byte> Reducer::Core::copy_to_host(std::vector<SnapshotEntry>& entries) {
  std::size_t size = 0;
  for (const SnapshotEntry& entry : entries) size += entry.data.size_in_bytes();
  std::vector<std::byte> copy(size);
  run_on_device([&](Stream& stream) {
    std::byte* place = copy.data();
    for (SnapshotEntry& entry : entries) {
      copy_bytes(place, entry.data.data, entry.data.size_in_bytes(), stream);
      entry.data.data = place;
      entry.data.device = {};
      place += entry.data.size_in_bytes();
    }
  });
  frozen_->pipeline().wait_done();
  return copy;
}

void Reducer::Core::save_snapshot(const std::filesystem::path& path, std::int64_t step) {
  require_idle("save_snapshot");
  if (ledger_.pending()) {
    wait_idle();
    require_no_local_sums("save_snapshot");
  } else {
    require_result("save_snapshot");
  }
  SnapshotInfo info;
  info.id = snapshot_id_;
  info.step = step;
  info.replicate_size = mesh_.replicate_size();
  info.shard_size = mesh_.shard_size();
  info.rank = mesh_.rank();
  info.microbatch_count = ledger_.microbatch();
  info.divide_factor = ledger_.divide_factor();
  info.loss_scale = ledger_.loss_scale();
  info.replica_dtype = options_.replica_dtype.value_or(finest_wire(frozen_->layout().buckets()));
  info.replica_hop = options_.replica_hop->name();
  info.reduction = options_.reduction;
  info.layout = name(options_.layout);
  info.engine = world_.engine_name();
  info.partial = ledger_.pending();
  std::vector<SnapshotEntry> entries = snapshot_entries();
  std::vector<std::byte> copy;
  if (mesh_.device().type != DeviceType::kHost) copy = copy_to_host(entries);
  snapshots_.submit(path, info, entries);
}

void Reducer::Core::flush_snapshots() { snapshots_.flush(); }

}  // namespace hsdp
