#include "hsdp/flight_record.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <system_error>

#include "hsdp/comm/engine.h"
#include "hsdp/comm/operation_record.h"
#include "hsdp/error.h"
#include "hsdp/reducer/flight_watch.h"
#include "hsdp/snapshot/atomic_file.h"

namespace hsdp {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFlightRecord = "flight record";

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// What does not apply is left out.
ordered_json to_json(const RecordedOperation& one) {
  const OperationPlace& place = one.place;
  ordered_json json{
      {"number", one.number}, {"source", one.source}, {"kind", std::string(name(place.kind))}};
  if (place.step >= 0) json["step"] = place.step;
  if (place.microbatch >= 0) json["microbatch"] = place.microbatch;
  if (place.turn >= 0) json["turn"] = place.turn;
  if (place.index >= 0) json["index"] = place.index;
  if (place.bytes > 0) json["bytes"] = place.bytes;
  json["state"] = std::string(name(one.state));
  json["begin_s"] = one.begin_s;
  if (one.state != OperationState::kBegun) json["end_s"] = one.end_s;
  return json;
}

ordered_json to_json(const FlightOrigin& origin, std::string_view reason) {
  comm::Control& control = origin.world.engine()->control();
  const comm::ControlReport report = control.report();
  const OperationRecord::Contents contents = control.operations()->read();
  const std::chrono::duration<double> wall = std::chrono::system_clock::now().time_since_epoch();
  ordered_json json{{"format", kFlightFormat},
                    {"version", kFlightVersion},
                    {"job", std::stoll(contents.job)},
                    {"rank", control.rank()},
                    {"size", control.size()},
                    {"host", host_name()},
                    {"process", ::getpid()},
                    {"engine", std::string(origin.world.engine_name())},
                    {"replicate", origin.replicate},
                    {"shard", origin.shard},
                    {"reason", std::string(reason)},
                    {"error", report.error},
                    {"steady_s", Operations::now_s()},
                    {"wall_s", wall.count()},
                    {"waits", ordered_json::array()},
                    {"sources", ordered_json::array()},
                    {"operations", ordered_json::array()}};
  for (const comm::ControlReport::Wait& wait : report.waits) {
    ordered_json one{{"operation", wait.operation}, {"seconds", wait.seconds}};
    if (wait.bucket >= 0) one["bucket"] = wait.bucket;
    if (wait.peer >= 0) one["rank"] = wait.peer;
    json["waits"].push_back(std::move(one));
  }
  for (const auto& [number, source] : contents.sources) {
    json["sources"].push_back({{"source", number},
                               {"name", source.name},
                               {"replicate", source.replicate},
                               {"shard", source.shard},
                               {"ranks", source.ranks}});
  }
  for (const RecordedOperation& one : contents.operations) {
    json["operations"].push_back(to_json(one));
  }
  return json;
}

}  // namespace

void write_flight_record(const FlightOrigin& origin, const std::filesystem::path& folder,
                         std::string_view reason) {
  // A name may be cut within a character.
  const std::string text =
      to_json(origin, reason).dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
  const int rank = origin.world.engine()->control().rank();
  try {
    make_flight_folder(folder);
    AtomicFile file(flight_path(folder, rank), kFlightRecord);
    file.write_at(0, std::as_bytes(std::span(text)));
    file.commit();
  } catch (const SnapshotError& error) {
    throw Error(error.what());
  }
}

std::filesystem::path flight_path(const std::filesystem::path& folder, int rank) {
  return folder / ("rank_" + std::to_string(rank) + ".json");
}

void make_flight_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && std::filesystem::is_directory(folder)) return;
  throw UsageError({.where = kFlightRecord,
                    .expected = "a folder that exists or can be made",
                    .got = folder.string() + " (" + error.message() + ")"});
}

void write_flight_record(const Mesh& mesh, const std::filesystem::path& folder) {
  write_flight_record(FlightOrigin{mesh.world(), mesh.replicate_size(), mesh.shard_size()}, folder,
                      "call");
}

}  // namespace hsdp
