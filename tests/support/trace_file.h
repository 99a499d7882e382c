// Reads a trace and checks what must hold for every trace: that Perfetto shows what it says.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/thread_ranks.h"

namespace hsdp::test {

struct TraceSlice {
  std::string kind;
  int rank = 0;
  int track = 0;
  double begin_us = 0;
  double end_us = 0;
  nlohmann::json args;
  [[nodiscard]] std::int64_t arg(const char* key) const {
    return args.value(key, std::int64_t{-1});
  }
  // Its step, microbatch and bucket.
  [[nodiscard]] auto place() const {
    return std::tuple(kind, arg("step"), arg("microbatch"), arg("bucket"));
  }
};

struct TraceFile {
  nlohmann::json other;
  std::map<int, std::string> ranks;                             // their names
  std::map<std::pair<int, int>, std::string> tracks;            // by rank and track
  std::vector<TraceSlice> slices;                               // in time
  std::map<std::int64_t, std::vector<nlohmann::json>> flows{};  // by id, in the file's order

  [[nodiscard]] std::vector<TraceSlice> of(int rank, const std::string& kind) const {
    std::vector<TraceSlice> found;
    std::ranges::copy_if(slices, std::back_inserter(found), [&](const TraceSlice& one) {
      return one.rank == rank && one.kind == kind;
    });
    return found;
  }
};

inline TraceFile read_trace(const std::filesystem::path& path) {
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  TraceFile trace{.other = json.at("otherData"), .ranks = {}, .tracks = {}, .slices = {}};
  for (const nlohmann::json& event : json.at("traceEvents")) {
    const std::string phase = event.at("ph");
    const int rank = event.at("pid");
    if (phase == "X") {
      const std::string name = event.at("name");
      const double begin = event.at("ts");
      trace.slices.push_back({name.substr(0, name.find(' ')), rank, event.at("tid"), begin,
                              begin + event.at("dur").get<double>(), event.at("args")});
      const std::int64_t bucket = trace.slices.back().arg("bucket");
      if (bucket >= 0) {
        EXPECT_EQ(name, trace.slices.back().kind + " " + std::to_string(bucket));
      }
    } else if (phase == "M" && event.at("name") == "process_name") {
      trace.ranks[rank] = event.at("args").at("name");
    } else if (phase == "M" && event.at("name") == "thread_name") {
      trace.tracks[{rank, event.at("tid")}] = event.at("args").at("name");
    } else if (phase != "M") {
      trace.flows[event.at("id")].push_back(event);
    }
  }
  std::ranges::stable_sort(trace.slices, {}, &TraceSlice::begin_us);
  return trace;
}

// Checks the trace of a mesh whose Reducer ran `steps` steps of two microbatches, the last with a
// replica hop.
inline void expect_whole_trace(const TraceFile& trace, MeshShape shape, int steps, int buckets) {
  const auto count = [](const std::vector<TraceSlice>& some) {
    return static_cast<int>(some.size());
  };
  ASSERT_EQ(static_cast<int>(trace.ranks.size()), shape.size());
  EXPECT_EQ(trace.other.at("dropped_operations"), 0);
  const double error_ms = trace.other.at("clock_error_ms");
  EXPECT_GT(error_ms, 0);
  EXPECT_LT(error_ms, 100);
  for (int rank = 0; rank < shape.size(); ++rank) {
    EXPECT_EQ(trace.ranks.at(rank), "rank " + std::to_string(rank) + " (replica " +
                                        std::to_string(rank / shape.shard) + ", shard " +
                                        std::to_string(rank % shape.shard) + ")");
    EXPECT_EQ(count(trace.of(rank, "pack")), steps * 2 * buckets);
    EXPECT_EQ(count(trace.of(rank, "shard_hop")), steps * 2 * buckets);
    EXPECT_EQ(count(trace.of(rank, "replica_hop")), steps * buckets);
    EXPECT_EQ(count(trace.of(rank, "word")), steps * 2);
  }
  std::map<std::pair<int, int>, long long> ends;  // in nanoseconds
  for (const TraceSlice& one : trace.slices) {
    EXPECT_GE(one.begin_us, -error_ms * 1e3);
    EXPECT_GT(one.end_us, one.begin_us);
    EXPECT_TRUE(trace.tracks.contains({one.rank, one.track}));
    long long& end = ends[{one.rank, one.track}];
    EXPECT_GE(std::llround(one.begin_us * 1e3), end) << "slices of one track overlap";
    end = std::max(end, std::llround(one.end_us * 1e3));
    if (one.kind == "pack" || one.kind == "shard_hop" || one.kind == "replica_hop") {
      EXPECT_GE(one.arg("bytes"), one.kind == "replica_hop" ? 0 : 1);  // a row may be empty
      EXPECT_GE(one.arg("step"), 0);
      EXPECT_GE(one.arg("microbatch"), 0);
      EXPECT_GE(one.arg("bucket"), 0);
    }
  }
}

// Each bucket has its arrows, from slice to slice in the order in which it travels.
inline void expect_flows(const TraceFile& trace, MeshShape shape, int steps, int buckets) {
  EXPECT_EQ(static_cast<int>(trace.flows.size()), shape.size() * steps * 2 * buckets);
  int to_replicas = 0;
  for (const auto& [id, flow] : trace.flows) {
    std::string way;
    std::vector<TraceSlice> stations;
    for (const nlohmann::json& event : flow) {
      way += event.at("ph").get<std::string>();
      for (const TraceSlice& one : trace.slices) {
        if (one.rank == event.at("pid") && one.track == event.at("tid") &&
            one.begin_us == event.at("ts").get<double>()) {
          stations.push_back(one);
        }
      }
    }
    ASSERT_EQ(stations.size(), flow.size()) << "an arrow leads to no slice";
    EXPECT_TRUE(way == "sf" || way == "stf") << way;
    if (way == "stf") ++to_replicas;
    const std::array<const char*, 3> kinds{"pack", "shard_hop", "replica_hop"};
    for (std::size_t i = 0; i < stations.size(); ++i) {
      EXPECT_EQ(stations[i].kind, kinds.at(i));
      for (const char* const key : {"step", "microbatch", "bucket"}) {
        EXPECT_EQ(stations[i].arg(key), stations[0].arg(key));
      }
      EXPECT_GE(stations[i].begin_us, stations[0].begin_us);
    }
  }
  EXPECT_EQ(to_replicas, shape.size() * steps * buckets);
}

// On the host no hop ends before it has begun on all ranks of its group.
inline void expect_one_clock(const TraceFile& trace, MeshShape shape) {
  const double error_us = trace.other.at("clock_error_ms").get<double>() * 1e3;
  std::map<std::pair<int, std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t>>,
           std::pair<double, double>>
      hops;
  for (const TraceSlice& one : trace.slices) {
    if (one.kind != "shard_hop" && one.kind != "replica_hop") continue;
    const int group = one.kind == "shard_hop" ? one.rank / shape.shard : one.rank % shape.shard;
    const auto [hop, is_new] =
        hops.try_emplace({group, one.place()}, std::pair(one.begin_us, one.end_us));
    hop->second.first = std::max(hop->second.first, one.begin_us);
    hop->second.second = std::min(hop->second.second, one.end_us);
  }
  EXPECT_FALSE(hops.empty());
  for (const auto& [hop, span] : hops) EXPECT_LE(span.first, span.second + error_us);
}

}  // namespace hsdp::test
