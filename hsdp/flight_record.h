// Writes down what this rank's Reducers and lanes did last, to find out later which rank a job
// waited for: docs/tasks/hanging_jobs.md.
//
// The library writes the same file by itself, into the folder of HSDP_FLIGHT_DIR, when the world
// ends with an error and on SIGUSR1.
#pragma once

#include <filesystem>

#include "hsdp/mesh.h"

namespace hsdp {

// Writes rank_N.json into `folder`, where N is this process's rank in the job, and makes the folder
// where there is none. Any thread, any time while the mesh is open; asks no other rank. Throws
// Error when the file cannot be written; one from before stays then.
void write_flight_record(const Mesh& mesh, const std::filesystem::path& folder);

}  // namespace hsdp
