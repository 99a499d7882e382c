// Where every parameter's elements lie in the buckets, and which shard rank owns which slice.
//
// Slices are cut first, buckets second, so that a parameter's slices never depend on how it travels
// [Note: slices before buckets]. Read-only, the same on every rank of a shard group; no
// communication. Memory is O(buckets + parameters): details of every rank are computed on request.
//
// flat: parameters of one group, class and wire dtype are joined up to bucket_bytes, and the join
//   is cut into S even ranges. A larger parameter is cut by itself and travels in several buckets,
//   each a window of all S ranges. With a slice multiple, every cut lies at a multiple of it in the
//   flattened parameter, or at the parameter's end.
// dim0: rank r owns rows [r c, min((r+1) c, d0)), c = ceil(d0 / S), unpadded; a scalar belongs to
//   rank 0. Rank r's part of a bucket is the concatenation of its slices.
// whole: each parameter belongs to one rank; the longest are assigned first, each to the rank with
//   the least. Consecutive parameters form a join with one row per rank, which holds its parameters
//   one after the other. A bucket is a window of all rows [Note: whole parameters].
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/dtype.h"
#include "hsdp/index_check.h"
#include "hsdp/row_cut.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

// How parameters are cut into slices, as described above.
enum class Layout : std::uint8_t { kFlat, kDim0, kWhole };
[[nodiscard]] std::string_view name(Layout layout);

// What the layout needs to know about one parameter.
struct LayoutParameter {
  Shape shape{};
  Dtype wire_dtype = Dtype::kF32;
  int group = 0;
  int bucket_class = 0;  // parameters of different classes never share a bucket
  int unit = 0;          // nor do consecutive parameters of different units
  // Nor do complex and real ones, so that a complex number is aligned to its two parts.
  bool is_complex = false;
};

// One rank's part of a parameter.
struct Slice {
  std::int64_t offset = 0;  // in the flattened parameter
  std::int64_t count = 0;
};

// A run of one parameter's elements in a bucket: elements [flat_offset, flat_offset + count) of the
// flattened parameter lie at [bucket_offset, ...), entirely in one or more ranks' rows.
struct BucketSegment {
  int parameter = 0;
  std::int64_t flat_offset = 0;
  std::int64_t bucket_offset = 0;
  std::int64_t count = 0;
};

struct Bucket {
  int group = 0;
  Dtype wire_dtype = Dtype::kF32;
  std::int64_t count = 0;       // elements in all ranks' rows
  std::vector<int> parameters;  // ascending, each once; includes empty ones
};

// How evenly the ranks share a layout: 1 is even.
struct LayoutBalance {
  double elements = 1;  // the most that a rank owns, relative to the mean
  double traffic = 1;   // ranks times the longest row of each bucket, relative to all data
};

// Buckets first, first + 1, ..., end - 1.
struct BucketRun {
  int first = 0;
  int end = 0;

  [[nodiscard]] int count() const { return end - first; }
};

// A run of one parameter in one rank's row of a bucket.
struct ParameterRange {
  int parameter = 0;        // registration order
  std::int64_t offset = 0;  // first element, in the row
  std::int64_t count = 0;
  std::int64_t flat_offset = 0;  // of that element in the flattened parameter
};

class BucketLayout {
 public:
  BucketLayout(std::span<const LayoutParameter> parameters, int shard_size, Layout layout,
               std::int64_t bucket_bytes, std::int64_t slice_multiple = 1);

  [[nodiscard]] int shard_size() const { return shard_size_; }
  [[nodiscard]] int parameter_count() const { return static_cast<int>(parameters_.size()); }
  // These and the following throw UsageError for a parameter, rank or bucket that does not exist.
  [[nodiscard]] const LayoutParameter& parameter(int parameter) const {
    return parameters_[check_index(kWhere, "a parameter below", parameter, parameter_count())];
  }
  [[nodiscard]] Slice slice(int parameter, int shard_rank) const;
  // The slices of one parameter over all shard ranks, as a cut of the flattened parameter.
  [[nodiscard]] RowCut slices(int parameter) const;
  // How many elements a rank owns.
  [[nodiscard]] std::int64_t shard_count(int shard_rank) const;
  [[nodiscard]] LayoutBalance balance() const;

  // In the order in which they travel.
  [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }
  [[nodiscard]] std::int64_t max_bucket_bytes() const;  // wire bytes
  // The consecutive numbers of the buckets that list a parameter. If there are several, the first
  // has the beginning of every rank's slice, and each one continues where the previous one ends.
  [[nodiscard]] BucketRun buckets_of(int parameter) const;
  // The first bucket of the join that holds a parameter together with others. Joins are cut as a
  // whole, so one rank may own all of it. None if the parameter itself is cut.
  [[nodiscard]] std::optional<int> join_of(int parameter) const;
  // Whether it continues the rows of the previous bucket.
  [[nodiscard]] bool goes_on(int bucket) const;
  // Row r of the bucket goes to shard rank r.
  [[nodiscard]] RowCut rows(int bucket) const;
  // Elements in `rank_count` rows of the bucket, from that of `first_rank` on.
  [[nodiscard]] std::int64_t count_of(int bucket, int first_rank, int rank_count) const;
  // Where the parameters lie in that rank's row, in order and without gaps.
  [[nodiscard]] std::vector<ParameterRange> ranges(int bucket, int shard_rank) const;
  // Everything in the bucket, by parameter.
  [[nodiscard]] std::vector<BucketSegment> segments(int bucket) const;

 private:
  class Builder;
  struct Place {
    std::int64_t count = 0;  // elements
    // flat cuts joins (also of one large parameter), dim0 each parameter, whole none.
    std::int64_t join_offset = 0;  // its beginning in its join; whole: in its owner's row
    std::int64_t range = 0;        // flat, dim0: a rank's share of the join, or of the parameter
    std::int64_t window = 0;       // flat, dim0: elements of a slice in one of several buckets
    int owner = 0;                 // whole
    int join = 0;                  // the first bucket of its join
    int first_bucket = 0;
    int bucket_count = 0;
  };

  static constexpr std::string_view kWhere = "bucket layout";  // in errors

  [[nodiscard]] const Place& place(int parameter) const {
    return places_[check_index(kWhere, "a parameter below", parameter, parameter_count())];
  }
  [[nodiscard]] const Bucket& bucket(int number) const {
    return buckets_[check_index(kWhere, "a bucket below", number, std::ssize(buckets_))];
  }
  [[nodiscard]] std::int64_t join_cut(const Bucket& bucket, int rank) const;
  [[nodiscard]] std::int64_t slice_begin(int parameter, int rank) const;
  [[nodiscard]] Slice part(int parameter, int shard_rank, int bucket) const;
  [[nodiscard]] std::int64_t whole_cut(int parameter, int bucket) const;
  // The ranks that own elements of a parameter: first to end - 1.
  [[nodiscard]] std::pair<int, int> owners(int parameter) const;
  [[nodiscard]] bool has_whole_slices(const Bucket& bucket) const;

  int shard_size_ = 1;
  Layout kind_ = Layout::kFlat;
  std::int64_t multiple_ = 1;
  std::vector<LayoutParameter> parameters_;
  std::vector<Place> places_;  // [parameter]
  std::vector<Bucket> buckets_;
  std::vector<std::int64_t> row_begins_;  // whole: where a bucket begins in each row of its join
};

}  // namespace hsdp
