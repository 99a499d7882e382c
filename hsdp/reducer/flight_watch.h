// Writes flight records by itself, where HSDP_FLIGHT_DIR names a folder: when a world ends with an
// error, and on SIGUSR1. Without the variable nothing here does anything.
//
// A thread of the process writes, so that the control connection does not wait for a disk. At the
// process's exit, and where the last Reducer of a failed world goes, records are finished, unless
// that takes more than some seconds.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "hsdp/mesh.h"

namespace hsdp {

constexpr std::string_view kFlightFormat = "hsdp flight record";
constexpr int kFlightVersion = 1;

struct FlightOrigin {
  Communicator world;
  int replicate = 1;
  int shard = 1;
};

// As the public form; `reason`: why it is written.
void write_flight_record(const FlightOrigin& origin, const std::filesystem::path& folder,
                         std::string_view reason);
[[nodiscard]] std::filesystem::path flight_path(const std::filesystem::path& folder, int rank);
// UsageError where it is none and cannot be made one.
void make_flight_folder(const std::filesystem::path& folder);

// Makes the folder and starts the thread, once in a process. Throws what goes wrong.
void start_flight_writer();

class FlightWatch;
// Until the handle is dropped; what is still to be written then is written first. Null where no
// thread was started.
[[nodiscard]] std::shared_ptr<const FlightWatch> watch_flight(const Mesh& mesh);

}  // namespace hsdp
