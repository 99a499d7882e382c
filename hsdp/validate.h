// Checks that a snapshot is complete and sound: reads and checks every byte. The replicas must be
// bitwise equal (except partials), and no gradient may contain a NaN or an infinity.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "hsdp/snapshot.h"

namespace hsdp {

struct ValidateOptions {
  int thread_count = 0;                             // 0: as many as the machine has, up to 8
  std::function<void(double fraction)> progress{};  // may be called from any thread, one at a time
};

struct ParameterCheck {
  std::string name;
  Shape shape;
  std::int64_t count = 0;
  double max_absolute = 0;  // over the finite elements, like the norm
  double norm = 0;
  std::int64_t nonfinite = 0;
  std::int64_t first_nonfinite = -1;  // index in the flattened parameter
  std::int64_t first_unequal = -1;    // where a replica differs from the first
  int unequal_copy = 0;

  [[nodiscard]] bool sound() const { return nonfinite == 0 && first_unequal < 0; }
};

struct Validation {
  std::filesystem::path path;
  SnapshotInfo info;
  int copy_count = 1;
  std::vector<ParameterCheck> parameters;  // unsound ones first

  [[nodiscard]] bool sound() const { return parameters.empty() || parameters.front().sound(); }
};

// Throws SnapshotError if the snapshot is damaged.
[[nodiscard]] Validation validate_snapshot(const Snapshot& snapshot,
                                           const ValidateOptions& options = {});

}  // namespace hsdp
