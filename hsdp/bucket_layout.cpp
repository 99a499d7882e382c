#include "hsdp/bucket_layout.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace hsdp {
namespace {

std::int64_t round_nearest(std::int64_t value, std::int64_t multiple) {
  return (value + multiple / 2) / multiple * multiple;
}

}  // namespace

std::string_view name(Layout layout) {
  switch (layout) {
    case Layout::kFlat:
      return "flat";
    case Layout::kDim0:
      return "dim0";
    case Layout::kWhole:
      return "whole";
  }
  return "";
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

std::int64_t BucketLayout::slice_begin(int parameter, int rank) const {
  const Place& at = place(parameter);
  if (kind_ == Layout::kDim0) return std::min(rank * at.range, at.count);
  if (kind_ == Layout::kWhole) return rank > at.owner ? at.count : 0;
  return std::clamp<std::int64_t>(join_cut(bucket(at.first_bucket), rank) - at.join_offset, 0,
                                  at.count);
}

Slice BucketLayout::slice(int parameter, int shard_rank) const {
  check_index(kWhere, "a rank below", shard_rank, shard_size_);
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

LayoutBalance BucketLayout::balance() const {
  std::int64_t total = 0;
  std::int64_t most = 0;
  for (int r = 0; r < shard_size_; ++r) {
    total += shard_count(r);
    most = std::max(most, shard_count(r));
  }
  std::int64_t longest = 0;
  for (int b = 0; b < std::ssize(buckets_); ++b) longest += rows(b).longest();
  if (total == 0) return {};
  const auto share = [&](std::int64_t of_one) {
    return static_cast<double>(of_one) * shard_size_ / static_cast<double>(total);
  };
  return {share(most), share(longest)};
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

Slice BucketLayout::part(int parameter, int shard_rank, int bucket) const {
  const Place& at = place(parameter);
  const Slice whole = slice(parameter, shard_rank);
  if (at.bucket_count == 1 || whole.count == 0) return whole;
  if (kind_ == Layout::kWhole) {
    const std::int64_t begin = whole_cut(parameter, bucket);
    return {begin, whole_cut(parameter, bucket + 1) - begin};
  }
  const std::int64_t begin = std::min((bucket - at.first_bucket) * at.window, whole.count);
  return {whole.offset + begin, std::min(at.window, whole.count - begin)};
}

// Where that bucket begins in a parameter, counted from the parameter's beginning.
std::int64_t BucketLayout::whole_cut(int parameter, int bucket) const {
  const Place& at = place(parameter);
  if (bucket <= at.first_bucket) return 0;
  if (bucket >= at.first_bucket + at.bucket_count) return at.count;
  const std::int64_t offset = row_begins_[static_cast<std::size_t>(bucket)] - at.join_offset;
  return std::min(round_nearest(offset, multiple_), at.count);
}

std::pair<int, int> BucketLayout::owners(int parameter) const {
  if (kind_ != Layout::kWhole) return {0, shard_size_};
  return {place(parameter).owner, place(parameter).owner + 1};
}

bool BucketLayout::goes_on(int bucket) const {
  return place(this->bucket(bucket).parameters.front()).join != bucket;
}

bool BucketLayout::has_whole_slices(const Bucket& bucket) const {
  return kind_ != Layout::kWhole && place(bucket.parameters.front()).bucket_count == 1;
}

std::optional<int> BucketLayout::join_of(int parameter) const {
  const int first = place(parameter).join;
  if (kind_ == Layout::kWhole) return first;
  if (kind_ != Layout::kFlat || bucket(first).parameters.size() == 1) return std::nullopt;
  return first;
}

RowCut BucketLayout::rows(int bucket) const {
  const Bucket& b = this->bucket(bucket);
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(shard_size_) + 1);
  const std::span<std::int64_t> ends(offsets.begin() + 1, offsets.end());
  if (has_whole_slices(b)) {
    for (int r = 0; r < shard_size_; ++r) ends[static_cast<std::size_t>(r)] = join_cut(b, r + 1);
    return RowCut(std::move(offsets));
  }
  for (const int p : b.parameters) {
    const auto [first, end] = owners(p);
    for (int r = first; r < end; ++r) ends[static_cast<std::size_t>(r)] += part(p, r, bucket).count;
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  return RowCut(std::move(offsets));
}

std::int64_t BucketLayout::count_of(int bucket, int first_rank, int rank_count) const {
  const Bucket& b = this->bucket(bucket);
  const int last = first_rank + rank_count;
  if (has_whole_slices(b)) return join_cut(b, last) - join_cut(b, first_rank);
  std::int64_t count = 0;
  for (const int p : b.parameters) {
    const auto [begin, end] = owners(p);
    int r = std::max(begin, first_rank);
    if (kind_ != Layout::kWhole && multiple_ == 1 && rank_count > 0) {  // many rows of one length
      const Place& at = place(p);
      const std::int64_t even = std::clamp<std::int64_t>(at.count / at.range - r, 0, rank_count);
      count += even * part(p, r, bucket).count;
      r += static_cast<int>(even);
    }
    for (; r < std::min(end, last); ++r) count += part(p, r, bucket).count;
  }
  return count;
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
  const bool is_whole = kind_ == Layout::kWhole;
  segments.reserve(b.parameters.size() * static_cast<std::size_t>(is_whole ? 1 : shard_size_));
  const RowCut cut = rows(bucket);
  std::vector<std::int64_t> next(cut.offsets().begin(), cut.offsets().end());
  for (const int p : b.parameters) {
    const auto [first, end] = owners(p);
    for (int r = first; r < end; ++r) {
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
