// All files of an opened snapshot, and the location of every parameter's slices.
#pragma once

#include <filesystem>
#include <vector>

#include "hsdp/snapshot.h"
#include "hsdp/snapshot/snapshot_file.h"

namespace hsdp {

// Elements [begin, end) of a parameter lie in slice `parameter` of file `file`.
struct SlicePlace {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::size_t file = 0;
};

struct Snapshot::Files {
  std::filesystem::path path;
  std::vector<SnapshotFile> files;  // by rank
  std::vector<SnapshotParameter> parameters;
  int copy_count = 1;
  // places[copy * parameters.size() + parameter]: in ascending order, without gaps.
  std::vector<std::vector<SlicePlace>> places;

  void check_agreement() const;
  void place_slices();
};

}  // namespace hsdp
