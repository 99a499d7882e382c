// The HDF5 side of a snapshot file: groups, datasets and attributes for readers such as h5py, with
// room left for the data.
//
// Any thread may call it: the serial HDF5 library is entered under one mutex. HDF5 works in memory
// alone [Note: HDF5 for others].
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/snapshot/snapshot_header.h"

namespace hsdp {

struct Hdf5Structure {
  std::vector<std::byte> front;  // the bytes from the file's begin on; zeros follow
  std::uint64_t file_bytes = 0;
};

// Lays out a file behind a user block of `user_block_bytes` (a power of two, at least 512), data
// excepted. Sets the data offsets and the checksum table's offset in `header`. Throws
// SnapshotError.
[[nodiscard]] Hdf5Structure build_hdf5_structure(SnapshotHeader& header,
                                                 std::span<const std::uint64_t> block_checksums,
                                                 std::size_t user_block_bytes);

}  // namespace hsdp
