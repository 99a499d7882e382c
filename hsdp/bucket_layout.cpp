#include "hsdp/bucket_layout.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "hsdp/error.h"

namespace hsdp {
namespace {

// Ranges and windows start on multiples of this where that costs nothing.
constexpr std::int64_t kAlignedElements = 32;
// A rank's row starts on a cache line of its shard memory.
constexpr std::int64_t kShardAlignment = 16;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t round_nearest(std::int64_t value, std::int64_t multiple) {
  return (value + multiple / 2) / multiple * multiple;
}

// c of "rank r owns [r c, (r + 1) c)". Aligned once the imbalance is below one part in 32.
std::int64_t even_range(std::int64_t count, int size) {
  const std::int64_t even = (count + size - 1) / size;
  return even >= kAlignedElements * kAlignedElements ? round_up(even, kAlignedElements) : even;
}

}  // namespace

std::string_view name(Layout layout) { return layout == Layout::kFlat ? "flat" : "dim0"; }

// Builds buckets one parameter at a time. Per (group, class, wire) at most one bucket is open;
// buckets are numbered in the order in which they close, which is about the order in which the
// backward pass completes them.
class BucketLayout::Builder {
 public:
  Builder(BucketLayout& layout, Layout kind, std::int64_t bucket_bytes, std::int64_t multiple)
      : layout_(layout),
        kind_(kind),
        bucket_bytes_(bucket_bytes),
        multiple_(kind == Layout::kFlat ? multiple : 1),
        size_(layout.shard_size_) {
    layout_.shard_counts_.assign(static_cast<std::size_t>(size_), 0);
  }

  void add(const LayoutParameter& parameter) {
    const int index = static_cast<int>(counts_.size());
    const std::int64_t count = element_count(parameter.shape);
    counts_.push_back(count);
    layout_.slices_.emplace_back(static_cast<std::size_t>(size_));
    layout_.buckets_of_.emplace_back();
    cuts_.push_back(own_cut(parameter, count));
    const auto bytes = count * static_cast<std::int64_t>(size_bytes(parameter.wire_dtype));
    if (bytes > bucket_bytes_) {
      add_windows(index, parameter);
      return;
    }
    Open& open = open_[{parameter.group, parameter.bucket_class, parameter.wire_dtype}];
    if (!open.parameters.empty() && open.bytes + bytes > bucket_bytes_) close(open, parameter);
    open.parameters.push_back(index);
    open.bytes += bytes;
  }

  void finish(std::span<const LayoutParameter> parameters) {
    std::vector<Open*> rest;
    for (auto& [key, open] : open_) {
      if (!open.parameters.empty()) rest.push_back(&open);
    }
    std::ranges::sort(rest, {}, [](const Open* open) { return open->parameters.back(); });
    for (Open* open : rest) {
      close(*open, parameters[static_cast<std::size_t>(open->parameters.back())]);
    }
  }

 private:
  struct Open {
    std::vector<int> parameters;
    std::int64_t bytes = 0;
  };

  // The cut of a parameter that is cut by itself: by rows of dim 0, or into even ranges.
  [[nodiscard]] RowCut own_cut(const LayoutParameter& parameter, std::int64_t count) const {
    std::int64_t range = even_range(count, size_);
    if (kind_ == Layout::kDim0) {
      const std::int64_t rows = parameter.shape.empty() ? 1 : parameter.shape.front();
      const std::int64_t row = rows == 0 ? 0 : count / rows;
      range = (rows + size_ - 1) / size_ * row;
    }
    return cut_every(range, count, {&count, 1});
  }

  // Of a join of parameters of those counts.
  [[nodiscard]] RowCut cut_every(std::int64_t range, std::int64_t count,
                                 std::span<const std::int64_t> counts) const {
    if (multiple_ > 1) range = (count + size_ - 1) / size_;
    std::vector<std::int64_t> offsets{0};
    std::size_t parameter = 0;
    std::int64_t start = 0;  // of that parameter
    for (int r = 1; r < size_; ++r) {
      const std::int64_t offset = std::min(r * range, count);
      while (parameter + 1 < counts.size() && start + counts[parameter] <= offset) {
        start += counts[parameter++];
      }
      const std::int64_t own = counts.empty() ? 0 : counts[parameter];
      offsets.push_back(start + std::min(round_nearest(offset - start, multiple_), own));
    }
    offsets.push_back(count);
    return RowCut(std::move(offsets));
  }

  // A large parameter: bucket k is window k of all ranks' slices.
  void add_windows(int index, const LayoutParameter& parameter) {
    const RowCut& cut = cuts_[static_cast<std::size_t>(index)];
    std::int64_t longest = 0;
    for (int r = 0; r < size_; ++r) longest = std::max(longest, cut.length(r));
    const auto row_bytes = bucket_bytes_ / size_;
    std::int64_t window = std::max<std::int64_t>(
        1, row_bytes / static_cast<std::int64_t>(size_bytes(parameter.wire_dtype)));
    const std::int64_t unit = multiple_ > 1 ? multiple_ : kAlignedElements;
    if (window >= unit) window -= window % unit;
    window = std::max(window, multiple_);
    for (int r = 0; r < size_; ++r) place_slice(index, r, cut.begin(r), cut.length(r), align(r));
    for (std::int64_t begin = 0; begin < longest; begin += window) {
      std::vector<std::int64_t> offsets{0};
      std::vector<BucketSegment> segments;
      std::vector<std::int64_t> shard_offsets;
      for (int r = 0; r < size_; ++r) {
        const std::int64_t from = std::min(begin, cut.length(r));
        const std::int64_t length = std::min(begin + window, cut.length(r)) - from;
        if (length > 0) {
          segments.push_back({index, cut.begin(r) + from, offsets.back(), length});
        }
        shard_offsets.push_back(layout_.slice(index, r).shard_offset + from);
        offsets.push_back(offsets.back() + length);
      }
      emit({parameter.group,
            parameter.wire_dtype,
            RowCut(std::move(offsets)),
            std::move(segments),
            {index},
            std::move(shard_offsets)});
    }
    for (int r = 0; r < size_; ++r) {
      layout_.shard_counts_[static_cast<std::size_t>(r)] += cut.length(r);
    }
  }

  void close(Open& open, const LayoutParameter& like) {
    if (kind_ == Layout::kFlat) {
      close_flat(open, like);
    } else {
      close_dim0(open, like);
    }
    open = {};
  }

  // The join of the parameters is cut into even ranges, wherever parameters begin.
  void close_flat(const Open& open, const LayoutParameter& like) {
    std::vector<BucketSegment> segments;
    std::int64_t joined = 0;
    std::vector<std::int64_t> counts;
    for (const int index : open.parameters) {
      const std::int64_t count = counts_[static_cast<std::size_t>(index)];
      if (count > 0) segments.push_back({index, 0, joined, count});
      joined += count;
      counts.push_back(count);
    }
    RowCut rows = cut_every(even_range(joined, size_), joined, counts);
    std::vector<std::int64_t> shard_offsets;
    for (int r = 0; r < size_; ++r) {
      const std::int64_t base = align(r);
      shard_offsets.push_back(base);
      std::int64_t start = 0;
      for (const int index : open.parameters) {
        const std::int64_t count = counts_[static_cast<std::size_t>(index)];
        const std::int64_t low = std::clamp<std::int64_t>(rows.begin(r) - start, 0, count);
        const std::int64_t high = std::clamp<std::int64_t>(rows.begin(r + 1) - start, 0, count);
        place_slice(index, r, low, high - low,
                    base + std::max<std::int64_t>(start + low - rows.begin(r), 0));
        start += count;
      }
      layout_.shard_counts_[static_cast<std::size_t>(r)] += rows.length(r);
    }
    emit({like.group, like.wire_dtype, std::move(rows), std::move(segments), open.parameters,
          std::move(shard_offsets)});
  }

  // Rank r's row is the concatenation of its slices of the parameters.
  void close_dim0(const Open& open, const LayoutParameter& like) {
    std::vector<std::int64_t> offsets{0};
    std::vector<BucketSegment> segments;
    std::vector<std::int64_t> shard_offsets;
    for (int r = 0; r < size_; ++r) {
      std::int64_t place = align(r);
      shard_offsets.push_back(place);
      std::int64_t at = offsets.back();
      for (const int index : open.parameters) {
        const RowCut& cut = cuts_[static_cast<std::size_t>(index)];
        if (cut.length(r) > 0) segments.push_back({index, cut.begin(r), at, cut.length(r)});
        place_slice(index, r, cut.begin(r), cut.length(r), place);
        at += cut.length(r);
        place += cut.length(r);
      }
      layout_.shard_counts_[static_cast<std::size_t>(r)] += at - offsets.back();
      offsets.push_back(at);
    }
    emit({like.group, like.wire_dtype, RowCut(std::move(offsets)), std::move(segments),
          open.parameters, std::move(shard_offsets)});
  }

  void emit(Bucket bucket) {
    const int number = static_cast<int>(layout_.buckets_.size());
    for (const int index : bucket.parameters) {
      layout_.buckets_of_[static_cast<std::size_t>(index)].push_back(number);
    }
    layout_.buckets_.push_back(std::move(bucket));
  }

  std::int64_t align(int rank) {
    std::int64_t& count = layout_.shard_counts_[static_cast<std::size_t>(rank)];
    count = round_up(count, kShardAlignment);
    return count;
  }

  void place_slice(int index, int rank, std::int64_t flat, std::int64_t count, std::int64_t at) {
    layout_.slices_[static_cast<std::size_t>(index)][static_cast<std::size_t>(rank)] = {flat, count,
                                                                                        at};
  }

  BucketLayout& layout_;
  Layout kind_;
  std::int64_t bucket_bytes_;
  std::int64_t multiple_;
  int size_;
  std::vector<std::int64_t> counts_;
  std::vector<RowCut> cuts_;
  std::map<std::tuple<int, int, Dtype>, Open> open_;  // by group, class and wire
};

BucketLayout::BucketLayout(std::span<const LayoutParameter> parameters, int shard_size,
                           Layout layout, std::int64_t bucket_bytes, std::int64_t slice_multiple)
    : shard_size_(shard_size) {
  if (bucket_bytes < 1) {
    throw UsageError("bucket layout: expected bucket_bytes of at least 1, got " +
                     std::to_string(bucket_bytes));
  }
  if (slice_multiple < 1) {
    throw UsageError("bucket layout: expected a slice_multiple of at least 1, got " +
                     std::to_string(slice_multiple));
  }
  Builder builder(*this, layout, bucket_bytes, slice_multiple);
  for (const LayoutParameter& parameter : parameters) builder.add(parameter);
  builder.finish(parameters);
}

const ShardSlice& BucketLayout::slice(int parameter, int shard_rank) const {
  return slices_[static_cast<std::size_t>(parameter)][static_cast<std::size_t>(shard_rank)];
}

RowCut BucketLayout::slices(int parameter) const {
  std::vector<std::int64_t> offsets;
  offsets.reserve(static_cast<std::size_t>(shard_size_) + 1);
  for (int r = 0; r < shard_size_; ++r) offsets.push_back(slice(parameter, r).flat_offset);
  const ShardSlice& last = slice(parameter, shard_size_ - 1);
  offsets.push_back(last.flat_offset + last.count);
  return RowCut(std::move(offsets));
}

std::int64_t BucketLayout::shard_count(int shard_rank) const {
  return shard_counts_[static_cast<std::size_t>(shard_rank)];
}

std::int64_t BucketLayout::max_bucket_bytes() const {
  std::int64_t bytes = 0;
  for (const Bucket& bucket : buckets_) {
    bytes = std::max(
        bytes, bucket.rows.count() * static_cast<std::int64_t>(size_bytes(bucket.wire_dtype)));
  }
  return bytes;
}

std::vector<ParameterRange> shard_ranges(const BucketLayout& layout, int bucket, int shard_rank) {
  const Bucket& b = layout.buckets()[static_cast<std::size_t>(bucket)];
  const std::int64_t begin = b.rows.begin(shard_rank);
  const std::int64_t end = b.rows.begin(shard_rank + 1);
  std::vector<ParameterRange> ranges;
  for (const BucketSegment& segment : b.segments) {
    const std::int64_t low = std::max(segment.bucket_offset, begin);
    const std::int64_t high = std::min(segment.bucket_offset + segment.count, end);
    if (low >= high) continue;
    ranges.push_back({segment.parameter, low - begin, high - low,
                      segment.flat_offset + low - segment.bucket_offset});
  }
  return ranges;
}

std::span<const int> BucketLayout::buckets_of(int parameter) const {
  return buckets_of_[static_cast<std::size_t>(parameter)];
}

}  // namespace hsdp
