#include "hsdp/reducer/frozen.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/together.h"

namespace hsdp::reducer {
namespace {

// FNV-1a: tells different texts apart, and is the same in every build.
std::uint64_t digest_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

// On every rank the same first rank that differs from rank 0, none when all agree.
std::optional<int> first_difference(const std::vector<std::string>& all) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] != all.front()) return static_cast<int>(r);
  }
  return std::nullopt;
}

Reduction reduction_of(const ReducerOptions& options) {
  return options.reduction == "native" ? Reduction::kNative : Reduction::kExact;
}

// Digests first; only where they differ, those of the lines, and the text of the first line that
// differs.
void compare_registrations(const ParameterTable& parameters, Communicator& world) {
  const std::vector<std::string> lines = parameters.describe();
  std::string whole;
  std::string digests;
  for (const std::string& line : lines) {
    whole += line + "\n";
    digests += std::to_string(digest_of(line)) + "\n";
  }
  const std::vector<std::string> all = world.exchange(
      lines.empty() ? std::string() : std::to_string(digest_of(whole)), "registration");
  const auto empty = std::ranges::find(all, std::string());
  if (empty != all.end() && std::ranges::all_of(all, [](const auto& d) { return d.empty(); })) {
    throw UsageError("reducer: begin_microbatch: expected registered parameters, got none");
  }
  constexpr auto kRemedy = "; register the same parameters in the same order on every rank";
  if (empty != all.end()) {
    const auto rank = static_cast<int>(empty - all.begin());
    throw MismatchError(
        "reducer: begin_microbatch: expected registered parameters on every rank, got none on " +
            comm::ranks_text({rank}, world.size()) + kRemedy,
        {world.world_ranks()[static_cast<std::size_t>(rank)]});
  }
  if (!first_difference(all)) return;
  const std::vector<std::string> of_lines = world.exchange(digests, "registration");
  const std::optional<int> rank = first_difference(of_lines);
  if (!rank) return;  // the same lines after all
  const std::string& theirs = of_lines[static_cast<std::size_t>(*rank)];
  const auto differs = std::ranges::mismatch(of_lines.front(), theirs).in1;
  const auto line = std::count(of_lines.front().begin(), differs, '\n');
  const bool has_it = line < std::ssize(lines);
  const std::vector<std::string> texts = world.exchange(
      has_it ? lines[static_cast<std::size_t>(line)] : "no such parameter", "registration");
  throw MismatchError("reducer: parameter " + std::to_string(line) + ": expected " + texts.front() +
                          " as on rank 0, got " + texts[static_cast<std::size_t>(*rank)] + " (" +
                          comm::ranks_text({*rank}, world.size()) + ")" + kRemedy,
                      {world.world_ranks()[static_cast<std::size_t>(*rank)]});
}

HopPlan hop_plan(const FrozenSetting& setting, const BucketLayout& layout) {
  HopPlan plan;
  for (int p = 0; p < setting.parameters.size(); ++p) {
    plan.parameters.push_back(setting.parameters.hop_parameter(p));
  }
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    const Bucket& bucket = layout.buckets()[static_cast<std::size_t>(b)];
    plan.ranges.push_back(shard_ranges(layout, b, setting.groups.shard.rank()));
    plan.wires.push_back(setting.options.replica_dtype.value_or(bucket.wire_dtype));
  }
  plan.replicate_size = setting.groups.replicate.size();
  plan.reduction = reduction_of(setting.options);
  plan.device = setting.groups.device;
  plan.memory = setting.memory;
  return plan;
}

// Packing ahead needs a core for the thread that waits, beside those that reduce; a GPU does both.
PackOrder pack_order(Device device, int shard_size) {
  if (device.type != DeviceType::kHost) return PackOrder::kAhead;
  cpu_set_t cores;
  const bool known = ::sched_getaffinity(0, sizeof cores, &cores) == 0;
  return known && CPU_COUNT(&cores) <= shard_size ? PackOrder::kInTurn : PackOrder::kAhead;
}

}  // namespace

Frozen::Frozen(const FrozenSetting& setting) : outcome_(setting.outcome) {
  const ReducerOptions& options = setting.options;
  Groups& groups = setting.groups;
  Communicator& world = groups.world;
  compare_registrations(setting.parameters, world);
  together(world, "lay out its buckets", [&] {
    layout_ = setting.parameters.make_layout(groups.shard.size());
    memory_.emplace(setting.parameters, *layout_, groups.shard.rank(), groups.device,
                    options.accumulate_dtype, setting.memory);
  });
  if (groups.replicate.size() > 1) prepare_hop(setting);
  together(world, "allocate its carry", [&] { memory_->allocate_carry(groups.replicate); });
  together(world, "allocate its staging buckets", [&] { memory_->allocate_staging(groups.shard); });
  std::shared_ptr<IssueOrder> order;
  std::shared_ptr<IssueOrder::Issuer> issuer;
  if (!groups.on_host()) {
    together(world, "start its issuing thread", [&] { order = IssueOrder::of(world); });
    issuer = order->add_issuer();
  }
  together(world, "start its lanes", [&] {
    pipeline_.emplace(BucketPipeline::Setting{*layout_, *memory_, setting.outcome,
                                              setting.agreement, groups, options.replica_hop,
                                              reduction_of(options), issuer});
    collector_.emplace(Collector::Setting{
        setting.parameters, *layout_, *memory_, *pipeline_, setting.outcome, world, groups.device,
        options.backwards == Backwards::kMany, pack_order(groups.device, groups.shard.size())});
    pipeline_->set_collector(*collector_);
  });
  outcome_.set_on_change([this] { collector_->notify(); });
}

void Frozen::prepare_hop(const FrozenSetting& setting) {
  const std::shared_ptr<ReplicaHop>& hop = setting.options.replica_hop;
  Groups& groups = setting.groups;
  bool needs_gather_group = false;
  together(groups.world, "prepare its replica hop", [&] {
    hop_.emplace(hop, hop_plan(setting, *layout_));
    hop_->prepare();
    needs_gather_group = hop->needs_gather_group();
  });
  Communicator gather;
  if (needs_gather_group) {
    together(groups.world, "make a group of its replica hop",
             [&] { gather = groups.replicate.split(0, groups.replicate.rank()); });
  }
  together(groups.world, "bind its replica hop", [&] { hop->bind(groups.replicate, gather); });
}

Frozen::~Frozen() {
  pipeline_->drain();  // its tasks use the rest of this
  outcome_.set_on_change([] {});
}

}  // namespace hsdp::reducer
