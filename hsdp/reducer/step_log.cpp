#include "hsdp/reducer/step_log.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "hsdp/log.h"
#include "hsdp/reducer/agreed_options.h"

namespace hsdp::reducer {
namespace {

bool logs(const Groups& groups, LogLevel level) {
  return groups.world.rank() == 0 && is_logged(level);
}

std::string bytes_text(std::int64_t bytes) {
  constexpr std::int64_t kKib = 1 << 10;
  constexpr std::int64_t kMib = 1 << 20;
  if (bytes < kKib) return std::to_string(bytes) + " bytes";
  const bool is_small = bytes < kMib;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s",
                static_cast<double>(bytes) / static_cast<double>(is_small ? kKib : kMib),
                is_small ? "KiB" : "MiB");
  return text.data();
}

// "carry 4.00 MiB, staging 2.00 MiB"
std::string memory_text(const MemoryCount& memory) {
  constexpr std::array<std::pair<MemoryKind, const char*>, 5> kNames{
      {{MemoryKind::kCarry, "carry"},
       {MemoryKind::kStaging, "staging"},
       {MemoryKind::kReplicaHop, "replica hop"},
       {MemoryKind::kOptimizer, "optimizer"},
       {MemoryKind::kScratch, "scratch"}}};
  std::string text;
  for (const auto& [kind, its_name] : kNames) {
    const std::int64_t bytes = memory.of(kind).live;
    if (bytes == 0) continue;
    text += (text.empty() ? "" : ", ") + std::string(its_name) + " " + bytes_text(bytes);
  }
  return text;
}

}  // namespace

void log_layout(const ReducerOptions& options, const Groups& groups,
                const ParameterTable& parameters, const BucketLayout& layout,
                const MemoryCount& memory) {
  if (!logs(groups, LogLevel::kInfo)) return;
  std::int64_t elements = 0;
  std::int64_t buckets = 0;
  std::set<std::string_view> wires;
  for (const Bucket& bucket : layout.buckets()) {
    if (bucket.count == 0) continue;
    elements += bucket.count;
    ++buckets;
    wires.insert(name(bucket.wire_dtype));
  }
  std::string wire;
  for (const std::string_view one : wires) wire += (wire.empty() ? "" : " and ") + std::string(one);
  const std::string hop_wire =
      options.replica_dtype ? " in " + std::string(name(*options.replica_dtype)) : "";
  std::string text = title(options) + ": buckets " + std::to_string(buckets);
  if (buckets != 0) text += " of at most " + bytes_text(layout.max_bucket_bytes());
  text += ", parameters " + std::to_string(parameters.size()) + ", elements " +
          std::to_string(elements);
  if (!wire.empty()) text += ", wire " + wire;
  text += ", replica hop (" + options.replica_hop->describe() + ")" + hop_wire;
  const std::string its_memory = memory_text(memory);
  log_line(LogLevel::kInfo, its_memory.empty() ? text : text + ", on this rank: " + its_memory);
}

void log_step(const ReducerOptions& options, const Groups& groups, const MicrobatchPlan& plan) {
  if (!plan.ends_step() || !logs(groups, LogLevel::kDebug)) return;
  std::array<char, 32> waited{};
  std::snprintf(waited.data(), waited.size(), "%.3f",
                groups.operations.seconds(OperationKind::kWait));
  const std::int64_t microbatches = plan.microbatch + (plan.fresh ? 1 : 0);
  log_line(LogLevel::kDebug, title(options) + ": step " + std::to_string(plan.step) +
                                 ", microbatches " + std::to_string(microbatches) +
                                 ", this rank waited " + waited.data() + " s so far");
}

}  // namespace hsdp::reducer
