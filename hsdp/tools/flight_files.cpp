#include "hsdp/tools/flight_files.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/flight_watch.h"

namespace hsdp::flight {
namespace {

using Json = nlohmann::json;

Place place_of(const Json& one, const std::map<int, Source>& sources) {
  Place place;
  const auto source = sources.find(one.at("source").get<int>());
  if (source != sources.end()) place.source = source->second;
  place.kind = one.at("kind");
  place.step = one.value("step", std::int64_t{-1});
  place.microbatch = one.value("microbatch", std::int64_t{-1});
  place.turn = one.value("turn", std::int64_t{-1});
  place.index = one.value("index", std::int64_t{-1});
  return place;
}

RankFile read(const Json& record) {
  RankFile file;
  file.job = record.at("job").get<std::int64_t>();
  file.rank = record.at("rank");
  file.size = record.at("size");
  file.host = record.at("host");
  file.error = record.at("error");
  file.written_s = record.at("wall_s");
  const double offset_s = file.written_s - record.at("steady_s").get<double>();
  std::map<int, Source> sources;
  std::map<Source, int> namesakes;
  for (const Json& one : record.at("sources")) {
    Source source{one.at("name"), one.at("shard"), one.at("ranks"), 0};
    if (source.shard < 1) throw Error("a shard of " + std::to_string(source.shard));
    source.namesake = namesakes[source]++;
    file.sources.push_back(source);
    sources[one.at("source")] = source;
  }
  std::map<Place, int> repeats;
  for (const Json& one : record.at("operations")) {
    Place place = place_of(one, sources);
    place.repeat = repeats[place]++;
    file.is_cut = file.is_cut || (file.operations.empty() && one.at("number") != 0);
    file.operations.push_back({place, one.at("state"), one.at("begin_s").get<double>() + offset_s});
  }
  return file;
}

RankFile read(const std::filesystem::path& path) {
  const auto refuse = [&](const std::string& why) {
    throw Error({.where = "flight record: " + path.string(),
                 .expected = "the record of a rank",
                 .got = why,
                 .remedy = "take it out of the folder"});
  };
  std::ifstream stream(path, std::ios::binary);
  std::stringstream text;
  text << stream.rdbuf();
  if (!stream) refuse("a file that cannot be read");
  const Json record = Json::parse(text.str(), nullptr, false);
  if (record.is_discarded()) refuse("text that is no JSON, or ends early");
  if (!record.is_object() || record.value("format", Json()) != kFlightFormat) {
    refuse("JSON of another kind");
  }
  if (record.value("version", Json()) != kFlightVersion) {
    refuse("version " + record.value("version", Json()).dump() +
           ", which this hsdp_check does not "
           "know");
  }
  RankFile file;
  try {
    file = read(record);
  } catch (const std::exception& error) {
    refuse("one that lacks something (" + std::string(error.what()) + ")");
  }
  constexpr int kMostRanks = 1'000'000;
  if (path.filename() != "rank_" + std::to_string(file.rank) + ".json" || file.rank < 0 ||
      file.rank >= file.size || file.size > kMostRanks) {
    refuse("one of " + comm::ranks_text({file.rank}, file.size));
  }
  return file;
}

bool is_record_name(const std::string& name) {
  return name.starts_with("rank_") && name.ends_with(".json");
}

}  // namespace

std::string time_text(std::int64_t job) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const std::time_t seconds = job / kSecond;
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%FT%T", &utc);
  std::array<char, 8> milliseconds{};
  std::snprintf(milliseconds.data(), milliseconds.size(), ".%03dZ",
                static_cast<int>(job % kSecond / 1'000'000));
  return std::string(text.data()) + milliseconds.data();
}

std::optional<Partners> partners_of(const std::string& kind) {
  if (kind == "shard_hop" || kind == "gather") return Partners::kShardGroup;
  if (kind == "replica_hop") return Partners::kReplicateGroup;
  if (kind == "norm" || kind == "word") return Partners::kMesh;
  return std::nullopt;
}

std::vector<int> Source::partners(int rank, Partners whom) const {
  if (whom == Partners::kMesh) return ranks;
  const auto place = static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
  std::vector<int> found;
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    const bool together =
        whom == Partners::kShardGroup ? i / shard == place / shard : i % shard == place % shard;
    if (together) found.push_back(ranks[static_cast<std::size_t>(i)]);
  }
  return found;
}

Folder read_folder(const std::filesystem::path& folder) {
  Files files;
  std::error_code error;
  for (std::filesystem::directory_iterator i(folder, error), end; !error && i != end;
       i.increment(error)) {
    if (!is_record_name(i->path().filename().string())) continue;
    RankFile file = read(i->path());
    files[file.rank] = std::move(file);
  }
  if (error || files.empty()) {
    throw Error({.where = "flight record: " + folder.string(),
                 .expected = "a folder with files rank_N.json",
                 .got = error ? error.message() : "none",
                 .remedy = "start the job with HSDP_FLIGHT_DIR"});
  }
  const RankFile& newest = std::ranges::max_element(files, {}, [](const auto& one) {
                             return std::pair(one.second.job, one.second.written_s);
                           })->second;
  const std::int64_t job = newest.job;
  const int size = newest.size;
  std::vector<RankFile> earlier;
  std::erase_if(files, [&](auto& one) {
    const bool is_earlier = one.second.job != job || one.second.size != size;
    if (is_earlier) earlier.push_back(std::move(one.second));
    return is_earlier;
  });
  for (auto& [rank, file] : files) {
    for (const Operation& one : file.operations) file.by_place.emplace(one.place, &one);
  }
  return {std::move(files), std::move(earlier)};
}

}  // namespace hsdp::flight
