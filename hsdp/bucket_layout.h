// Where every parameter's elements lie in the buckets, and which shard rank owns which slice.
//
// Slices are cut first, buckets second, so that the slices of one parameter never depend on how it
// travels. Pure data, the same on every rank of a shard group; no communication.
//
// flat: parameters of one group, class and wire dtype are joined up to bucket_bytes and the join is
// cut
//   into S even ranges; a parameter larger than that is cut by itself and travels in several
//   buckets, each a window of all S ranges.
//   With a slice multiple every cut lies at such a multiple of the flattened parameter, or at its
//   end.
// dim0: rank r owns rows [r c, min((r+1) c, d0)), c = ceil(d0 / S), unpadded; a scalar belongs to
//   rank 0. Rank r's part of a bucket is the concatenation of its slices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/dtype.h"
#include "hsdp/row_cut.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

enum class Layout : std::uint8_t { kFlat, kDim0 };
[[nodiscard]] std::string_view name(Layout layout);

// What the layout needs to know of one parameter.
struct LayoutParameter {
  Shape shape;
  Dtype wire_dtype = Dtype::kF32;
  int group = 0;
  int bucket_class = 0;  // parameters of different classes never share a bucket
};

// A run of one parameter's elements in a bucket: elements [flat_offset, flat_offset + count) of the
// flattened parameter lie at [bucket_offset, ...), wholly in one or more ranks' rows.
struct BucketSegment {
  int parameter = 0;
  std::int64_t flat_offset = 0;
  std::int64_t bucket_offset = 0;
  std::int64_t count = 0;
};

struct Bucket {
  int group = 0;
  Dtype wire_dtype = Dtype::kF32;
  RowCut rows;                          // row r of the bucket goes to shard rank r
  std::vector<BucketSegment> segments;  // ascending bucket_offset
  std::vector<int> parameters;          // ascending, each once; also the empty ones
  std::vector<std::int64_t>
      shard_offsets;  // per shard rank: where its row lies in its shard memory
};

// Where one shard rank's slice of a parameter is.
struct ShardSlice {
  std::int64_t flat_offset = 0;  // in the flattened parameter
  std::int64_t count = 0;
  std::int64_t shard_offset = 0;  // in the rank's shard memory (carry)
};

// A run of one parameter in the shard memory of a bucket.
struct ParameterRange {
  int parameter = 0;        // registration order
  std::int64_t offset = 0;  // first element, in the bucket's shard data
  std::int64_t count = 0;
  std::int64_t flat_offset = 0;  // of that element in the flattened parameter
};

class BucketLayout {
 public:
  BucketLayout(std::span<const LayoutParameter> parameters, int shard_size, Layout layout,
               std::int64_t bucket_bytes, std::int64_t slice_multiple = 1);

  [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }
  [[nodiscard]] const ShardSlice& slice(int parameter, int shard_rank) const;
  // The slices of one parameter over all shard ranks, as a cut of the flattened parameter.
  [[nodiscard]] RowCut slices(int parameter) const;
  // Elements of shard memory that a rank needs.
  [[nodiscard]] std::int64_t shard_count(int shard_rank) const;
  [[nodiscard]] std::int64_t max_bucket_bytes() const;  // wire bytes
  [[nodiscard]] std::span<const int> buckets_of(int parameter) const;
  [[nodiscard]] int shard_size() const { return shard_size_; }
  [[nodiscard]] int parameter_count() const { return static_cast<int>(slices_.size()); }

 private:
  class Builder;
  int shard_size_ = 1;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<ShardSlice>> slices_;  // [parameter][shard rank]
  std::vector<std::vector<int>> buckets_of_;
  std::vector<std::int64_t> shard_counts_;
};

// Where the parameters lie in shard rank `shard_rank`'s row of a bucket.
[[nodiscard]] std::vector<ParameterRange> shard_ranges(const BucketLayout& layout, int bucket,
                                                       int shard_rank);

}  // namespace hsdp
