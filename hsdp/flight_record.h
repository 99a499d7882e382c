// Writes down what this rank's Reducers and lanes did last, to find out later which rank a job
// waited for: docs/tasks/hanging_jobs.md.
//
// The library writes the same file by itself, into the folder of HSDP_FLIGHT_DIR, when the world
// ends with an error and on SIGUSR1.
#pragma once

#include <filesystem>

#include "hsdp/mesh.h"

namespace hsdp {

// Writes `folder`/rank_N.json, N being this process's job rank; makes the folder if needed. Local.
// Call it from any thread while the mesh is open. Throws Error if the file cannot be written; an
// older file then stays.
void write_flight_record(const Mesh& mesh, const std::filesystem::path& folder);

}  // namespace hsdp
