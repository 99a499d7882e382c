#include "hsdp/tools/plan_report.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "hsdp/reducer/agreed_options.h"
#include "hsdp/reducer/plan_memory.h"
#include "hsdp/reducer/slice_gather.h"
#include "quant/loco_hop.h"
#include "zero/adamw.h"
#include "zero/parameter_gather.h"

namespace hsdp {
namespace {

std::int64_t bytes_of(Dtype dtype, std::int64_t count) {
  return count * static_cast<std::int64_t>(size_bytes(dtype));
}

bool has_master(Dtype dtype) { return dtype == Dtype::kBf16 || dtype == Dtype::kF16; }

// Up to the first number in a name: "model.layers.3." of "model.layers.3.mlp.weight". Parameters
// without one are in a unit together.
std::string unit_name(std::string_view name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view word = name.substr(begin, end - begin);
    const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
    if (!word.empty() && std::ranges::all_of(word, is_digit))
      return std::string(name.substr(0, end));
    begin = end + 1;
  }
  return {};
}

class Planner {
 public:
  explicit Planner(const PlanOptions& options)
      : options_(options),
        device_{options.device, 0},
        reducer_(complete(options)),
        table_(reducer_, options.replicate),
        parts_(reducer_.shard_over == ShardOver::kMesh ? options.replicate : 1),
        layout_(lay_out()) {
    for (int p = 0; p < table_.size(); ++p) {
      arrays_.push_back({p, {nullptr, table_.count(p), table_.spec(p).dtype, device_}});
    }
    gather_units_ = reducer::gather_units(layout_, arrays_, reducer::kGatherUnitBytes);
    add_parameters();
    if (options_.stage == 3) add_units();
    const bool has_gather =
        options_.stage == 1 || options_.stage == 2 || (options_.stage == 3 && parts_ > 1);
    if (has_gather && options_.device == DeviceType::kCuda) {
      gather_scratch_ = static_cast<std::int64_t>(reducer::gather_scratch(layout_, gather_units_));
    }
  }

  [[nodiscard]] PlanReport report() const {
    PlanReport report;
    for (const reducer::FullArray& one : arrays_) report.element_count += one.array.count;
    MemoryPlan plan_of_most;
    reducer::SliceOwner most;
    std::vector<HopNeed> hops;
    hops.reserve(static_cast<std::size_t>(options_.shard));
    for (int s = 0; s < options_.shard; ++s) {
      hops.push_back(reducer::plan_hop(table_, reducer_, layout_, planned({s, 0, parts_})));
    }
    const int rank_count = options_.shard * parts_;  // further replicas hold the same
    for (int r = 0; r < rank_count; ++r) {
      const reducer::SliceOwner owner{r % options_.shard, r / options_.shard, parts_};
      const MemoryPlan plan = plan_of(owner, hops[static_cast<std::size_t>(owner.shard_rank)]);
      PlannedMemory memory{r, rows(owner, plan)};
      const std::int64_t total = memory.total();
      report.least_total = r == 0 ? total : std::min(report.least_total, total);
      if (r > 0 && total <= report.most.total()) continue;
      report.most = std::move(memory);
      plan_of_most = plan;
      most = owner;
    }
    if (options_.shard > 1) report.traffic.push_back(in_shard_group(plan_of_most));
    if (options_.replicate > 1) report.traffic.push_back(between_replicas(most, plan_of_most));
    return report;
  }

 private:
  static ReducerOptions complete(const PlanOptions& options) {
    ReducerOptions reducer = options.reducer;
    if (options.loco) reducer.replica_hop = std::make_shared<quant::LocoHop>();
    return reducer::with_defaults(std::move(reducer), {options.device, 0},
                                  options.replicate * options.shard);
  }

  BucketLayout lay_out() {
    for (ParameterSpec spec : options_.parameters) {
      if (options_.stage == 3) {
        const auto number = static_cast<int>(units_.size());
        spec.unit = units_.try_emplace(unit_name(spec.name), number).first->second;
      }
      table_.add(spec);
    }
    return table_.make_layout(options_.shard * parts_);
  }

  [[nodiscard]] reducer::PlannedRank planned(const reducer::SliceOwner& owner) const {
    return {device_, owner, options_.shard, options_.replicate};
  }

  [[nodiscard]] MemoryPlan plan_of(const reducer::SliceOwner& owner, const HopNeed& hop) const {
    MemoryUse use;
    if (options_.stage == 1 && options_.microbatches > 1) use.local_sums = AccumulateDtype::kF32;
    return reducer::plan_memory(table_, reducer_, layout_, planned(owner), use, hop);
  }

  // Of whole parameters, and of the slices of each shard rank, with the parts of all replicas.
  // Where a rank has masters of whole slices, these are what is gathered.
  void add_parameters() {
    shard_bytes_.resize(static_cast<std::size_t>(options_.shard));
    for (const reducer::FullArray& one : arrays_) {
      whole_bytes_ += bytes_of(one.array.dtype, one.array.count);
      if (options_.stage != 3 && parts_ == 1) continue;
      if (parts_ == 1 && has_master(one.array.dtype)) continue;
      const RowCut cut = layout_.slices(one.parameter).joined(parts_);
      for (int s = 0; s < options_.shard; ++s) {
        shard_bytes_[static_cast<std::size_t>(s)] += bytes_of(one.array.dtype, cut.length(s));
      }
    }
  }

  [[nodiscard]] std::int64_t optimized_count(int parameter,
                                             const reducer::SliceOwner& owner) const {
    return options_.stage == 0 ? table_.count(parameter)
                               : layout_.slice(parameter, owner.slice_rank()).count;
  }

  [[nodiscard]] std::vector<PlannedMemory::Row> rows(const reducer::SliceOwner& owner,
                                                     const MemoryPlan& plan) const {
    std::int64_t moments = 0;
    std::int64_t masters = 0;
    for (int p = 0; p < table_.size(); ++p) {
      const std::int64_t count = optimized_count(p, owner);
      const Dtype dtype = table_.spec(p).dtype;
      moments +=
          dtype == Dtype::kF64 ? 2 * bytes_of(dtype, count) : zero::AdamW::moment_bytes(count);
      if (has_master(dtype)) masters += bytes_of(Dtype::kF32, count);
    }
    const std::int64_t held = options_.stage == 3
                                  ? shard_bytes_[static_cast<std::size_t>(owner.shard_rank)]
                                  : whole_bytes_;
    std::vector<PlannedMemory::Row> rows{
        {"parameters", options_.stage == 3 ? "slices of parameters" : "parameters", held},
        {"gradients", "p.grad", options_.stage == 0 ? whole_bytes_ : 0},
        {"carry_bytes", "gradient sums (carry)", plan.carry_bytes},
        {"accumulator_bytes", "local sums", plan.accumulator_bytes},
        {"optimizer_bytes", "moments of AdamW", moments},
        {"masters", "fp32 masters", masters},
        {"staging_bytes", "staging buckets", plan.staging_bytes},
        {"replica_hop_state_bytes", "replica hop", plan.replica_hop_state_bytes},
        {"gathered", "units gathered at a time", options_.stage == 3 ? two_units_bytes_ : 0},
        {"parameter_gather_bytes", "messages of gathers", message_bytes(owner)},
        {"scratch_bytes", "work memory of kernels", plan.scratch_bytes + gather_scratch_}};
    return rows;
  }

  [[nodiscard]] std::int64_t message_bytes(const reducer::SliceOwner& owner) const {
    if (options_.stage < 3) {
      // On a GPU they lie in reserved work memory.
      if (options_.device == DeviceType::kCuda) return 0;
      return reducer::unit_message_bytes(owner, layout_, gather_units_);
    }
    const bool has_parts = parts_ > 1 && options_.device == DeviceType::kHost;
    return std::max(unit_message_bytes_,
                    has_parts ? reducer::parts_message_bytes(owner, layout_, gather_units_) : 0);
  }

  // Of the unit in use and the one that is gathered ahead, in the order of their numbers, and of
  // the largest message of one.
  void add_units() {
    std::vector<std::int64_t> bytes(units_.size());
    std::vector<std::vector<reducer::CutArray>> together(units_.size());
    for (const reducer::FullArray& one : arrays_) {
      const auto unit = static_cast<std::size_t>(table_.spec(one.parameter).unit);
      const std::int64_t of_one = bytes_of(one.array.dtype, one.array.count);
      bytes[unit] += of_one;
      if (!reducer::shares_message(layout_, one.parameter, of_one)) continue;
      together[unit].push_back({one.array, layout_.slices(one.parameter).joined(parts_)});
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      two_units_bytes_ = std::max(two_units_bytes_, bytes[u] + (u == 0 ? 0 : bytes[u - 1]));
      unit_message_bytes_ =
          std::max(unit_message_bytes_, reducer::gather_message_bytes(options_.shard, together[u]));
    }
  }

  [[nodiscard]] PlannedTraffic in_shard_group(const MemoryPlan& plan) const {
    PlannedTraffic traffic{
        "shard", "in the shard group", options_.shard, {}, options_.shard_bandwidth};
    const std::int64_t reduced = options_.stage == 1 ? 1 : options_.microbatches;
    traffic.rows.push_back(
        {"shard_hop", "reduce-scatter of gradients", reduced, plan.shard_hop_bytes});
    // At stage 3 before the forward and before the backward pass.
    const std::int64_t gathers = options_.stage == 3 ? 2 * options_.microbatches : 1;
    traffic.rows.push_back({"gather", gather_title(), gathers, whole_bytes_});
    return traffic;
  }

  [[nodiscard]] PlannedTraffic between_replicas(const reducer::SliceOwner& owner,
                                                const MemoryPlan& plan) const {
    PlannedTraffic traffic{
        "replica", "between replicas", options_.replicate, {}, options_.replica_bandwidth};
    traffic.rows.push_back({"replica_hop", "replica hop", 1, plan.replica_hop_bytes});
    if (parts_ > 1) {
      traffic.rows.push_back(
          {"gather", gather_title(), 1, shard_bytes_[static_cast<std::size_t>(owner.shard_rank)]});
    }
    return traffic;
  }

  [[nodiscard]] const char* gather_title() const {
    return options_.stage == 0 ? "gather of gradients" : "gather of parameters";
  }

  const PlanOptions& options_;
  Device device_;
  ReducerOptions reducer_;
  reducer::ParameterTable table_;
  int parts_;                         // of a shard rank's slices
  std::map<std::string, int> units_;  // stage 3: their numbers
  BucketLayout layout_;
  std::vector<reducer::FullArray> arrays_;
  // The units of the Reducer's gathers at stage 0, of a ParameterGather's else.
  static_assert(zero::ParameterGather::kUnitBytes == reducer::kGatherUnitBytes);
  std::vector<reducer::GatherUnit> gather_units_;
  std::int64_t whole_bytes_ = 0;
  std::vector<std::int64_t> shard_bytes_;
  std::int64_t two_units_bytes_ = 0;     // stage 3
  std::int64_t unit_message_bytes_ = 0;  // stage 3
  std::int64_t gather_scratch_ = 0;
};

}  // namespace

std::int64_t PlannedMemory::total() const {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0},
                         [](std::int64_t sum, const Row& row) { return sum + row.bytes; });
}

double PlannedTraffic::sent(const Row& row) const {
  return static_cast<double>(row.times) * static_cast<double>(row.bytes) * (group_size - 1) /
         group_size;
}

std::optional<double> PlannedTraffic::seconds(const Row& row) const {
  return bandwidth ? std::optional(sent(row) / *bandwidth) : std::nullopt;
}

PlanReport make_plan(const PlanOptions& options) { return Planner(options).report(); }

}  // namespace hsdp
