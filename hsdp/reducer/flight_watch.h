// Writes flight records into the folder that HSDP_FLIGHT_DIR names, when a world ends with an error
// and on SIGUSR1. Without the variable nothing here does anything.
//
// A thread of the process writes, so that the control connection does not wait for a disk. The
// process's exit, and the destruction of the last Reducer of a failed world, wait some seconds for
// records to be finished.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "hsdp/mesh.h"

namespace hsdp {

constexpr std::string_view kFlightFormat = "hsdp flight record";
constexpr int kFlightVersion = 2;

struct FlightOrigin {
  Communicator world;
  int replicate = 1;
  int shard = 1;
};

// As the public function; `reason` goes into the record.
void write_flight_record(const FlightOrigin& origin, const std::filesystem::path& folder,
                         std::string_view reason);
[[nodiscard]] std::filesystem::path flight_path(const std::filesystem::path& folder, int rank);
// UsageError if the path is no folder and none can be made there.
void make_flight_folder(const std::filesystem::path& folder);

// Makes the folder and starts the thread, once in a process. Throws if either fails.
void start_flight_writer();

class FlightWatch;
// Watches the mesh until the handle is released, which first writes what is due. Null if no thread
// was started.
[[nodiscard]] std::shared_ptr<const FlightWatch> watch_flight(const Mesh& mesh);

}  // namespace hsdp
