#include "hsdp/reducer/result_files.h"

#include <span>
#include <utility>

#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"
#include "hsdp/kernels/digest.h"
#include "hsdp/reducer/slice_gather.h"
#include "hsdp/reducer/together.h"

namespace hsdp::reducer {

ResultFiles::ResultFiles(const Sources& sources, std::string snapshot_id, MemoryCount memory)
    : options_(sources.options),
      parameters_(sources.parameters),
      groups_(sources.groups),
      steps_(sources.steps),
      results_(sources.results),
      snapshot_id_(std::move(snapshot_id)),
      memory_(std::move(memory)),
      snapshots_(memory_) {}

// This shard rank's slices: views of the result, or in `copies` if each replica has a part of them.
std::vector<SnapshotEntry> ResultFiles::snapshot_entries(Buffer& copies) {
  std::vector<SnapshotEntry> entries;
  for (int p = 0; p < parameters_.size(); ++p) {
    const ParameterSpec& spec = parameters_.spec(p);
    entries.push_back({spec.name, spec.shape, spec.dtype, parameters_.wire_dtype(p),
                       results_.shard_slice(p).offset, results_.own_slice(p)});
  }
  if (groups_.parts > 1) copies = gather_replica_parts(entries);
  return entries;
}

Buffer ResultFiles::gather_replica_parts(std::vector<SnapshotEntry>& entries) {
  const BucketLayout& layout = results_.layout();
  std::vector<CutArray> slices;
  std::vector<FullArray> all;
  std::size_t size = 0;
  for (int p = 0; p < parameters_.size(); ++p) {
    const Dtype dtype = results_.own_slice(p).dtype;
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
  results_.run_now(Lane::Scope::kAllRanks, [&](Stream& stream) {
    const int part = groups_.replicate.rank();
    for (const GatherUnit& unit : gather_units(layout, all, kGatherUnitBytes)) {
      std::vector<CutArray> together;
      for (const FullArray& one : unit) {
        const CutArray& slice =
            together.emplace_back(slices[static_cast<std::size_t>(one.parameter)]);
        const TensorView own = results_.own_slice(one.parameter);
        copy_bytes(slice.array.slice(slice.cut.begin(part), own.count).data, own.data,
                   own.size_in_bytes(), stream);
      }
      results_.count_all_gathers(gather_arrays(groups_.replicate, together, memory_, stream));
    }
  });
  for (std::size_t p = 0; p < slices.size(); ++p) entries[p].data = slices[p].array;
  return copies;
}

// Copies the entries' data to the host, and returns the memory.
std::vector<std::byte> ResultFiles::copy_to_host(std::vector<SnapshotEntry>& entries,
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
  results_.run_now(Lane::Scope::kThisRank, [&](Stream& stream) {
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

void ResultFiles::save_snapshot(const std::filesystem::path& path, std::int64_t step) {
  const StepLedger& ledger = steps_.ledger();
  steps_.require_idle("save_snapshot");
  if (ledger.pending()) {
    if (groups_.parts > 1) throw Results::no_partial("save_snapshot");
    steps_.wait_reduced();
    results_.require_no_local_sums("save_snapshot");
  } else {
    results_.require_result("save_snapshot");
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

void ResultFiles::save_digest(const std::filesystem::path& folder, std::int64_t step) {
  results_.require_result("save_digest");
  DigestHeader header{options_.name, groups_.world.rank(), groups_.replicate.size(),
                      groups_.shard.size()};
  const auto count = static_cast<std::size_t>(parameters_.size());
  const Buffer pinned(groups_.device, count * sizeof(std::uint64_t), Buffer::Place::kPinnedHost);
  const std::span sums(reinterpret_cast<std::uint64_t*>(pinned.data()), count);
  results_.run_now(Lane::Scope::kThisRank, [&](Stream& stream) {
    for (int p = 0; p < parameters_.size(); ++p) {
      const Slice own = results_.slice(p);
      header.parts.push_back({parameters_.spec(p).name, own.offset, own.count});
      std::uint64_t& sum = sums[static_cast<std::size_t>(p)];
      sum = 0;
      kernels::add_digest(results_.own_slice(p), 0, &sum, stream);
    }
  });
  if (!groups_.on_host()) groups_.world.wait(steps_.caller().record());
  if (!digests_ || digests_->folder() != folder) digests_.emplace(folder, header);
  digests_->append(step, sums);
}

}  // namespace hsdp::reducer
