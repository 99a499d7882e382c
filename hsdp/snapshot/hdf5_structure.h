// The HDF5 side of a snapshot file: groups, datasets and attributes for readers such as h5py, with
// space left for data and checksums.
//
// Only this part calls the HDF5 library, on the thread of the public call and through the gate set
// by set_hdf5_gate(), never on a thread of this library [Note: others who use HDF5]. HDF5 works in
// memory only [Note: HDF5 for others].
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hsdp/snapshot/snapshot_header.h"

namespace hsdp {

struct Hdf5Structure {
  // The bytes from the start of the file to at least the end of the checksum table; zeros follow.
  std::vector<std::byte> front;
  std::uint64_t file_bytes = 0;
};

// Lays out a file behind a user block of `user_block_bytes` (a power of two, at least 512), with
// space for a table of `header.block_count` checksums. Leaves data and checksums empty. Sets the
// data offsets and the checksum table's offset in `header`. Throws SnapshotError.
[[nodiscard]] Hdf5Structure build_hdf5_structure(SnapshotHeader& header,
                                                 std::size_t user_block_bytes);

}  // namespace hsdp
