#include "hsdp/bucket_layout.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "hsdp/error.h"

namespace hsdp {
namespace {

// Ranges and windows start on multiples of this where that costs nothing.
constexpr std::int64_t kAlignedElements = 32;

std::int64_t ceil_div(std::int64_t value, std::int64_t parts) {
  return (value + parts - 1) / parts;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

std::int64_t round_nearest(std::int64_t value, std::int64_t multiple) {
  return (value + multiple / 2) / multiple * multiple;
}

// c of "rank r owns [r c, (r + 1) c)". Aligned once the imbalance is below one part in 32.
std::int64_t even_range(std::int64_t count, int size) {
  const std::int64_t even = ceil_div(count, size);
  return even >= kAlignedElements * kAlignedElements ? round_up(even, kAlignedElements) : even;
}

void require_positive(const std::string& what, std::int64_t value) {
  if (value >= 1) return;
  throw UsageError({.where = "bucket layout",
                    .expected = what + " of at least 1",
                    .got = std::to_string(value)});
}

}  // namespace

std::string_view name(Layout layout) { return layout == Layout::kFlat ? "flat" : "dim0"; }

// Builds buckets one parameter at a time. Per (group, class, wire) at most one bucket is open;
// buckets are numbered in the order in which they close, which is about the order in which the
// backward pass completes them.
class BucketLayout::Builder {
 public:
  Builder(BucketLayout& layout, std::int64_t bucket_bytes)
      : layout_(layout), bucket_bytes_(bucket_bytes) {}

  void add(int index) {
    const LayoutParameter& parameter = layout_.parameter(index);
    const std::int64_t count = element_count(parameter.shape);
    Place& place = layout_.places_.emplace_back(Place{.count = count});
    if (layout_.kind_ == Layout::kDim0) {
      const std::int64_t rows = parameter.shape.empty() ? 1 : parameter.shape.front();
      const std::int64_t row = rows == 0 ? 0 : count / rows;
      place.range = ceil_div(rows, layout_.shard_size_) * row;
    }
    const auto wire_bytes = static_cast<std::int64_t>(size_bytes(parameter.wire_dtype));
    if (count * wire_bytes > bucket_bytes_) {
      add_windows(index);
      return;
    }
    Bucket& open = open_[{parameter.group, parameter.bucket_class, parameter.wire_dtype}];
    if ((open.count + count) * wire_bytes > bucket_bytes_) close(open);
    place.join_offset = open.count;
    open.group = parameter.group;
    open.wire_dtype = parameter.wire_dtype;
    open.count += count;
    open.parameters.push_back(index);
  }

  void finish() {
    std::vector<Bucket*> rest;
    for (auto& [key, open] : open_) {
      if (!open.parameters.empty()) rest.push_back(&open);
    }
    std::ranges::sort(rest, {}, [](const Bucket* open) { return open->parameters.back(); });
    for (Bucket* open : rest) close(*open);
  }

 private:
  void close(Bucket& open) {
    open.parameters.shrink_to_fit();
    for (const int index : open.parameters) {
      Place& place = layout_.places_[static_cast<std::size_t>(index)];
      if (layout_.kind_ == Layout::kFlat) place.range = flat_range(open.count);
      place.first_bucket = static_cast<int>(layout_.buckets_.size());
      place.bucket_count = 1;
    }
    layout_.buckets_.push_back(std::exchange(open, {}));
  }

  [[nodiscard]] std::int64_t flat_range(std::int64_t count) const {
    const int size = layout_.shard_size_;
    return layout_.multiple_ > 1 ? ceil_div(count, size) : even_range(count, size);
  }

  // A large parameter is a join of one, in several buckets: bucket k is window k of all slices.
  void add_windows(int index) {
    const LayoutParameter& parameter = layout_.parameter(index);
    Place& place = layout_.places_[static_cast<std::size_t>(index)];
    Bucket whole{parameter.group, parameter.wire_dtype, place.count, {index}};
    close(whole);
    const RowCut cut = layout_.slices(index);
    place.window = window_size(parameter.wire_dtype);
    place.bucket_count = static_cast<int>(ceil_div(cut.longest(), place.window));
    layout_.buckets_.pop_back();
    for (int k = 0; k < place.bucket_count; ++k) {
      Bucket window{parameter.group, parameter.wire_dtype, 0, {index}};
      for (int r = 0; r < cut.size(); ++r) {
        window.count += std::clamp<std::int64_t>(cut.length(r) - k * place.window, 0, place.window);
      }
      layout_.buckets_.push_back(std::move(window));
    }
  }

  [[nodiscard]] std::int64_t window_size(Dtype wire_dtype) const {
    const std::int64_t multiple = layout_.multiple_;
    const std::int64_t row_bytes = bucket_bytes_ / layout_.shard_size_;
    std::int64_t window =
        std::max<std::int64_t>(1, row_bytes / static_cast<std::int64_t>(size_bytes(wire_dtype)));
    const std::int64_t unit = multiple > 1 ? multiple : kAlignedElements;
    if (window >= unit) window -= window % unit;
    return std::max(window, multiple);
  }

  BucketLayout& layout_;
  std::int64_t bucket_bytes_;
  std::map<std::tuple<int, int, Dtype>, Bucket> open_;  // by group, class and wire
};

BucketLayout::BucketLayout(std::span<const LayoutParameter> parameters, int shard_size,
                           Layout layout, std::int64_t bucket_bytes, std::int64_t slice_multiple)
    : shard_size_(shard_size),
      kind_(layout),
      multiple_(layout == Layout::kFlat ? slice_multiple : 1),
      parameters_(parameters.begin(), parameters.end()) {
  require_positive("bucket_bytes", bucket_bytes);
  require_positive("a slice_multiple", slice_multiple);
  Builder builder(*this, bucket_bytes);
  for (int p = 0; p < parameter_count(); ++p) builder.add(p);
  builder.finish();
}

// Where rank r's part begins in the join of a bucket's parameters.
std::int64_t BucketLayout::join_cut(const Bucket& bucket, int rank) const {
  if (kind_ == Layout::kDim0) {
    std::int64_t begin = 0;
    for (const int p : bucket.parameters) begin += slice_begin(p, rank);
    return begin;
  }
  const Place& last = place(bucket.parameters.back());
  const std::int64_t count = last.join_offset + last.count;
  if (rank == shard_size_) return count;
  const std::int64_t offset = std::min(rank * last.range, count);
  if (multiple_ == 1) return offset;
  const auto offset_of = [this](int parameter) { return place(parameter).join_offset; };
  const Place& cut =
      place(*std::prev(std::ranges::upper_bound(bucket.parameters, offset, {}, offset_of)));
  return cut.join_offset + std::min(round_nearest(offset - cut.join_offset, multiple_), cut.count);
}

// Where its slice of a parameter begins.
std::int64_t BucketLayout::slice_begin(int parameter, int rank) const {
  const Place& at = place(parameter);
  if (kind_ == Layout::kDim0) return std::min(rank * at.range, at.count);
  return std::clamp<std::int64_t>(join_cut(bucket(at.first_bucket), rank) - at.join_offset, 0,
                                  at.count);
}

Slice BucketLayout::slice(int parameter, int shard_rank) const {
  const std::int64_t begin = slice_begin(parameter, shard_rank);
  return {begin, slice_begin(parameter, shard_rank + 1) - begin};
}

RowCut BucketLayout::slices(int parameter) const {
  std::vector<std::int64_t> offsets;
  offsets.reserve(static_cast<std::size_t>(shard_size_) + 1);
  for (int r = 0; r <= shard_size_; ++r) offsets.push_back(slice_begin(parameter, r));
  return RowCut(std::move(offsets));
}

std::int64_t BucketLayout::shard_count(int shard_rank) const {
  std::int64_t count = 0;
  for (int p = 0; p < parameter_count(); ++p) count += slice(p, shard_rank).count;
  return count;
}

std::int64_t BucketLayout::max_bucket_bytes() const {
  std::int64_t bytes = 0;
  for (const Bucket& bucket : buckets_) {
    bytes =
        std::max(bytes, bucket.count * static_cast<std::int64_t>(size_bytes(bucket.wire_dtype)));
  }
  return bytes;
}

BucketRun BucketLayout::buckets_of(int parameter) const {
  const Place& at = place(parameter);
  return {at.first_bucket, at.first_bucket + at.bucket_count};
}

// The part of a slice that travels in that bucket.
Slice BucketLayout::part(int parameter, int shard_rank, int bucket) const {
  const Place& at = place(parameter);
  const Slice whole = slice(parameter, shard_rank);
  if (at.bucket_count == 1) return whole;
  const std::int64_t begin = std::min((bucket - at.first_bucket) * at.window, whole.count);
  return {whole.offset + begin, std::min(at.window, whole.count - begin)};
}

bool BucketLayout::has_whole_slices(const Bucket& bucket) const {
  return place(bucket.parameters.front()).bucket_count == 1;
}

std::optional<int> BucketLayout::join_of(int parameter) const {
  const int first = place(parameter).first_bucket;
  if (kind_ != Layout::kFlat || bucket(first).parameters.size() == 1) return std::nullopt;
  return first;
}

RowCut BucketLayout::rows(int bucket) const {
  const Bucket& b = this->bucket(bucket);
  const bool joined = has_whole_slices(b);
  std::vector<std::int64_t> offsets{0};
  offsets.reserve(static_cast<std::size_t>(shard_size_) + 1);
  for (int r = 0; r < shard_size_; ++r) {
    offsets.push_back(joined ? join_cut(b, r + 1)
                             : offsets.back() + part(b.parameters.front(), r, bucket).count);
  }
  return RowCut(std::move(offsets));
}

std::vector<ParameterRange> BucketLayout::ranges(int bucket, int shard_rank) const {
  std::vector<ParameterRange> ranges;
  std::int64_t offset = 0;
  for (const int p : this->bucket(bucket).parameters) {
    const Slice own = part(p, shard_rank, bucket);
    if (own.count == 0) continue;
    ranges.push_back({p, offset, own.count, own.offset});
    offset += own.count;
  }
  return ranges;
}

std::vector<BucketSegment> BucketLayout::segments(int bucket) const {
  const Bucket& b = this->bucket(bucket);
  std::vector<BucketSegment> segments;
  if (kind_ == Layout::kFlat && has_whole_slices(b)) {  // one after the other
    segments.reserve(b.parameters.size());
    for (const int p : b.parameters) {
      const Place& at = place(p);
      if (at.count > 0) segments.push_back({p, 0, at.join_offset, at.count});
    }
    return segments;
  }
  segments.reserve(b.parameters.size() * static_cast<std::size_t>(shard_size_));
  const RowCut cut = rows(bucket);
  std::vector<std::int64_t> next(cut.offsets().begin(), cut.offsets().end());
  for (const int p : b.parameters) {
    for (int r = 0; r < shard_size_; ++r) {
      const Slice own = part(p, r, bucket);
      if (own.count == 0) continue;
      std::int64_t& place_in_row = next[static_cast<std::size_t>(r)];
      segments.push_back({p, own.offset, place_in_row, own.count});
      place_in_row += own.count;
    }
  }
  return segments;
}

}  // namespace hsdp
