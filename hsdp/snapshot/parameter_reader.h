// Reads the elements of parameters block by block, and checks each block once as it is read.
//
// Holds one block and a few descriptors. Not thread-safe, but any number of readers may read one
// snapshot at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "hsdp/comm/unique_fd.h"
#include "hsdp/snapshot.h"

namespace hsdp {

// Adjacent elements in one checked block.
struct StoredElements {
  const std::byte* data = nullptr;  // valid until the reader's next call
  std::int64_t count = 0;
  Dtype dtype = Dtype::kF32;
};

class ParameterReader {
 public:
  explicit ParameterReader(Snapshot snapshot);

  // Returns at least one element from `begin`, which must be valid; as stored: partials are sums.
  [[nodiscard]] StoredElements read(std::size_t parameter, int copy, std::int64_t begin);
  [[nodiscard]] const Snapshot& snapshot() const { return snapshot_; }
  [[nodiscard]] Dtype stored_dtype(std::size_t parameter) const;

 private:
  [[nodiscard]] int descriptor(std::size_t file);

  Snapshot snapshot_;
  std::vector<std::byte> buffer_;
  std::unordered_map<std::size_t, comm::UniqueFd> descriptors_;
  // The block that `buffer_` holds.
  std::size_t parameter_ = 0;
  std::size_t file_ = 0;
  std::size_t block_ = 0;
  std::span<const std::byte> bytes_;
};

// The divisor for the stored elements of a partial; 1 for results.
[[nodiscard]] double stored_divisor(const SnapshotInfo& info);

// Converts stored elements to mean gradients. f64 is rounded when `out` is float.
void convert(const StoredElements& stored, double divisor, std::span<float> out);
void convert(const StoredElements& stored, double divisor, std::span<double> out);

}  // namespace hsdp
