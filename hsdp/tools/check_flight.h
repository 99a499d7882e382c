// What the flight records of a folder say: which ranks a job waited for, and where.
#pragma once

#include <filesystem>
#include <string>

namespace hsdp {

struct FlightFindings {
  std::string text;
  bool is_complete = false;  // every rank left a record, and none waited for another
};

// Reads the files rank_N.json of `folder` that the newest job left. Throws Error for one that is
// none, and where there are none.
[[nodiscard]] FlightFindings read_flight(const std::filesystem::path& folder);

}  // namespace hsdp
