// Reads the elements of parameters block by block, each block checked once as it comes in.
//
// Holds one block and a few descriptors: cheap to keep, not to be shared between threads. Any
// number of readers may read one snapshot at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "hsdp/comm/unique_fd.h"
#include "hsdp/snapshot.h"

namespace hsdp {

// Elements that lie together in one checked block.
struct StoredElements {
  const std::byte* data = nullptr;  // valid until the reader's next call
  std::int64_t count = 0;
  Dtype dtype = Dtype::kF32;
};

class ParameterReader {
 public:
  explicit ParameterReader(Snapshot snapshot);

  // At least one element from `begin` on, as stored: partials are sums. `begin` must be inside.
  [[nodiscard]] StoredElements read(std::size_t parameter, int copy, std::int64_t begin);
  [[nodiscard]] const Snapshot& snapshot() const { return snapshot_; }
  [[nodiscard]] Dtype stored_dtype(std::size_t parameter) const;

 private:
  [[nodiscard]] int descriptor(std::size_t file);

  Snapshot snapshot_;
  std::vector<std::byte> buffer_;
  std::unordered_map<std::size_t, comm::UniqueFd> descriptors_;
  // Which block `buffer_` holds.
  std::size_t parameter_ = 0;
  std::size_t file_ = 0;
  std::size_t block_ = 0;
  std::span<const std::byte> bytes_;
};

// What divides the stored elements of a partial; 1 for results.
[[nodiscard]] double stored_divisor(const SnapshotInfo& info);

// Mean gradients from stored elements. f64 is rounded when `out` is float.
void convert(const StoredElements& stored, double divisor, std::span<float> out);
void convert(const StoredElements& stored, double divisor, std::span<double> out);

}  // namespace hsdp
