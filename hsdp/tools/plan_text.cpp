#include "hsdp/tools/plan_text.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "hsdp/tools/text_table.h"

namespace hsdp {
namespace {

using nlohmann::ordered_json;

constexpr int kPlanSchema = 1;
constexpr std::size_t kTableWidth = 200;

std::string gib_text(std::int64_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f", static_cast<double>(bytes) / 0x1p30);
  return text.data();
}

std::string seconds_text(std::optional<double> seconds) {
  if (!seconds) return "-";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", *seconds);
  return text.data();
}

std::int64_t rounded(double bytes) { return std::llround(bytes); }

std::string setting_text(const PlanOptions& options, const PlanReport& report) {
  const bool over_mesh = options.reducer.shard_over == ShardOver::kMesh;
  return count_text(report.element_count) + " elements in " +
         count_text(std::ssize(options.parameters)) + " parameters on " +
         std::to_string(options.replicate) + " x " + std::to_string(options.shard) +
         " ranks (replicate x shard), stage " + std::to_string(options.stage) +
         (over_mesh ? " over the mesh, " : ", ") + (options.loco ? "LoCo" : "plain") + " hop, " +
         count_text(options.microbatches) +
         (options.microbatches == 1 ? " microbatch" : " microbatches");
}

std::string memory_text(const PlanReport& report) {
  TextTable table({{"held by a rank", false, 9}, {"bytes", true, 9}, {"GiB", true, 9}});
  const auto add = [&table](const std::string& title, std::int64_t bytes) {
    table.add_row(' ', {title, count_text(bytes), gib_text(bytes)});
  };
  for (const PlannedMemory::Row& row : report.most.rows) {
    if (row.bytes > 0) add(row.title, row.bytes);
  }
  const std::int64_t total = report.most.total();
  add("all", total);
  std::string text = table.render(kTableWidth);
  if (total == report.least_total) return text;
  return text + "  of rank " + std::to_string(report.most.rank) +
         ", which holds most; the least that one holds is " + count_text(report.least_total) +
         " bytes\n";
}

std::string traffic_text(const PlannedTraffic& traffic) {
  TextTable table({{"sent " + traffic.title, false, 9},
                   {"times", true, 9},
                   {"bytes", true, 9},
                   {"leave a rank", true, 9},
                   {"seconds", true, 9}});
  for (const PlannedTraffic::Row& row : traffic.rows) {
    table.add_row(' ',
                  {row.title, count_text(row.times), count_text(row.bytes),
                   count_text(rounded(traffic.sent(row))), seconds_text(traffic.seconds(row))});
  }
  return table.render(kTableWidth);
}

}  // namespace

std::string plan_text(const PlanOptions& options, const PlanReport& report) {
  std::string text = setting_text(options, report) + "\n\n" + memory_text(report);
  for (const PlannedTraffic& traffic : report.traffic) text += "\n" + traffic_text(traffic);
  return text;
}

std::string plan_json(const PlanOptions& options, const PlanReport& report) {
  ordered_json memory{{"rank", report.most.rank}};
  for (const PlannedMemory::Row& row : report.most.rows) memory[row.key] = row.bytes;
  memory["total"] = report.most.total();
  memory["least_total"] = report.least_total;
  ordered_json traffic = ordered_json::object();
  for (const PlannedTraffic& group : report.traffic) {
    ordered_json& of_group = traffic[group.key];
    of_group["group_size"] = group.group_size;
    for (const PlannedTraffic::Row& row : group.rows) {
      const std::optional<double> seconds = group.seconds(row);
      of_group[row.key] = {{"times", row.times},
                           {"bytes", row.bytes},
                           {"sent_bytes", rounded(group.sent(row))},
                           {"seconds", seconds ? ordered_json(*seconds) : ordered_json(nullptr)}};
    }
  }
  const ordered_json root{{"schema", kPlanSchema},
                          {"tool", "hsdp_plan"},
                          {"version", HSDP_VERSION},
                          {"element_count", report.element_count},
                          {"parameter_count", options.parameters.size()},
                          {"replicate_size", options.replicate},
                          {"shard_size", options.shard},
                          {"stage", options.stage},
                          {"shard_over", word_of(options.reducer.shard_over)},
                          {"hop", options.loco ? "loco" : "plain"},
                          {"microbatch_count", options.microbatches},
                          {"memory", memory},
                          {"traffic", traffic}};
  return root.dump(2) + "\n";
}

}  // namespace hsdp
