// What the ranks of a planned job hold and send, by the functions that size a Reducer's memory,
// its hop's, zero::AdamW's and the gathers'. Computed in this process for one rank after another.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/tools/plan_options.h"

namespace hsdp {

// Bytes of a rank.
struct PlannedMemory {
  struct Row {
    std::string key;  // of JSON: where stats() counts it, its name there
    std::string title;
    std::int64_t bytes = 0;
  };
  int rank = 0;
  std::vector<Row> rows;

  [[nodiscard]] std::int64_t total() const;
};

// What a rank sends in one of its groups.
struct PlannedTraffic {
  struct Row {
    std::string key;
    std::string title;
    std::int64_t times = 0;  // in a step
    std::int64_t bytes = 0;  // of the messages, each time; an all-reduce's twice
  };
  std::string key;
  std::string title;
  int group_size = 1;
  std::vector<Row> rows;
  std::optional<double> bandwidth;  // bytes a second

  // Of a message a rank keeps its own row.
  [[nodiscard]] double sent(const Row& row) const;
  [[nodiscard]] std::optional<double> seconds(const Row& row) const;
};

struct PlanReport {
  std::int64_t element_count = 0;
  PlannedMemory most;                   // of the rank that holds most
  std::int64_t least_total = 0;         // of the one that holds least
  std::vector<PlannedTraffic> traffic;  // in the shard group, between replicas; of that rank
};

[[nodiscard]] PlanReport make_plan(const PlanOptions& options);

}  // namespace hsdp
