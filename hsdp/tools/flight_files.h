// The flight records of a folder as data, read back from what hsdp/flight_record.cpp has written.
#pragma once

#include <compare>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace hsdp::flight {

// Whom an operation is done with.
enum class Partners { kShardGroup, kReplicateGroup, kMesh };

// None: each rank does it alone.
[[nodiscard]] std::optional<Partners> partners_of(const std::string& kind);

struct Source {
  std::string name;
  int shard = 1;
  std::vector<int> ranks;
  int namesake = 0;  // how many of that name and those ranks came before it
  auto operator<=>(const Source&) const = default;  // NOLINT(modernize-use-nullptr): it errs

  // Those with whom that rank does it, itself among them.
  [[nodiscard]] std::vector<int> partners(int rank, Partners whom) const;
};

// The same on all ranks.
struct Place {
  Source source;
  std::string kind;
  std::int64_t step = -1;
  std::int64_t microbatch = -1;
  std::int64_t turn = -1;
  std::int64_t index = -1;
  int repeat = 0;                                  // of a call that comes several times in a step
  auto operator<=>(const Place&) const = default;  // NOLINT(modernize-use-nullptr): it errs
};

struct Operation {
  Place place;
  std::string state;
  double begin_s = 0;  // by the wall clock
  [[nodiscard]] bool is_done() const { return state == "done"; }
};

struct RankFile {
  std::int64_t job = 0;  // when it began: nanoseconds of its rank 0's time of day
  int rank = 0;
  int size = 0;
  std::string host;
  std::string error;
  double written_s = 0;
  bool is_cut = false;  // there were more operations
  std::vector<Source> sources;
  std::vector<Operation> operations;
  std::map<Place, const Operation*> by_place;
};

using Files = std::map<int, RankFile>;  // by rank

[[nodiscard]] std::string time_text(std::int64_t job);

struct Folder {
  Files files;                    // of the newest job
  std::vector<RankFile> earlier;  // what other jobs have left, by rank
};
// Throws Error for a file rank_N.json that is none, and where there are none.
[[nodiscard]] Folder read_folder(const std::filesystem::path& folder);

}  // namespace hsdp::flight
