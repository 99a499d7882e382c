// Cuts parameters into buckets: how a BucketLayout is built.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

// A join of whole parameters with uneven rows is closed once it has this fraction of all elements.
constexpr std::int64_t kPartOfAll = 4;
// Ranges and windows start at multiples of this if that costs nothing.
constexpr std::int64_t kAlignedElements = 32;
// Of a layout. Beyond it the buckets' descriptions alone take 100 MB and more.
constexpr std::int64_t kMostBuckets = std::int64_t{1} << 20U;

std::int64_t ceil_div(std::int64_t value, std::int64_t parts) {
  return (value + parts - 1) / parts;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// c of "rank r owns [r c, (r + 1) c)". Aligned if the imbalance stays below one part in 32.
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

// The owner of each parameter: the longest parameters come first, each goes to the rank with the
// least. Among parameters of about equal length (to a power of two), neighbours go to different
// ranks, so that every rank has some from all along a model.
std::vector<int> longest_first(std::span<const LayoutParameter> parameters, int size) {
  std::vector<std::int64_t> counts;
  counts.reserve(parameters.size());
  for (const LayoutParameter& one : parameters) counts.push_back(element_count(one.shape));
  std::vector<std::size_t> order(counts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater<>(), [&](std::size_t p) {
    return std::bit_width(static_cast<std::uint64_t>(counts[p]));
  });
  using Load = std::pair<std::int64_t, int>;  // elements, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int r = 0; r < size; ++r) least.emplace(0, r);
  std::vector<int> owners(counts.size());
  for (const std::size_t p : order) {
    const auto [load, rank] = least.top();
    least.pop();
    owners[p] = rank;
    least.emplace(load + counts[p], rank);
  }
  return owners;
}

}  // namespace

// Builds buckets one parameter at a time. At most one bucket is open per (group, class, wire).
// Buckets are numbered as they close, roughly the order in which the backward pass completes them.
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
    if (layout_.kind_ == Layout::kWhole) {
      add_whole(index);
      return;
    }
    const auto wire_bytes = static_cast<std::int64_t>(size_bytes(parameter.wire_dtype));
    if (count * wire_bytes > bucket_bytes_) {
      add_windows(index);
      return;
    }
    Bucket& open = open_[kind_of(parameter)].bucket;
    const bool is_full = (open.count + count) * wire_bytes > bucket_bytes_;
    if (is_full || (!open.parameters.empty() && unit_of(open) != parameter.unit)) close(open);
    place.join_offset = open.count;
    append(open, index);
  }

  // Call before the first parameter of layout whole.
  void deal_whole() {
    owners_ = longest_first(layout_.parameters_, layout_.shard_size_);
    for (const LayoutParameter& parameter : layout_.parameters_) {
      open_[kind_of(parameter)].to_come += element_count(parameter.shape);
    }
    for (auto& [kind, open] : open_) open.most = open.to_come / kPartOfAll;
  }

  void finish() {
    std::vector<Open*> rest;
    for (auto& [kind, open] : open_) {
      if (!open.bucket.parameters.empty()) rest.push_back(&open);
    }
    std::ranges::sort(rest, {}, [](const Open* open) { return open->bucket.parameters.back(); });
    for (Open* open : rest) {
      if (layout_.kind_ == Layout::kWhole) {
        close_whole(*open);
      } else {
        close(open->bucket);
      }
    }
  }

 private:
  using Kind = std::tuple<int, int, Dtype, bool>;  // group, class, wire, is_complex
  // The bucket that parameters are joined in; whole: the whole join.
  struct Open {
    Bucket bucket;
    std::vector<std::int64_t> rows;  // whole: elements per rank
    std::int64_t to_come = 0;        // whole: elements of this kind not added yet
    std::int64_t most = 0;           // whole: size at which it is closed, even if uneven
  };

  static Kind kind_of(const LayoutParameter& parameter) {
    return {parameter.group, parameter.bucket_class, parameter.wire_dtype, parameter.is_complex};
  }

  [[nodiscard]] int unit_of(const Bucket& open) const {
    return layout_.parameter(open.parameters.front()).unit;
  }

  void append(Bucket& open, int index) {
    const LayoutParameter& parameter = layout_.parameter(index);
    open.group = parameter.group;
    open.wire_dtype = parameter.wire_dtype;
    open.count += layout_.place(index).count;
    open.parameters.push_back(index);
  }

  // Closes a join when it fills a bucket and its rows are even enough, or when it has its part of
  // the model: a bucket is complete only once the gradients of all its rows are there.
  void add_whole(int index) {
    Open& open = open_[kind_of(layout_.parameter(index))];
    Place& place = layout_.places_[static_cast<std::size_t>(index)];
    place.owner = owners_[static_cast<std::size_t>(index)];
    open.rows.resize(static_cast<std::size_t>(layout_.shard_size_));
    std::int64_t& row = open.rows[static_cast<std::size_t>(place.owner)];
    place.join_offset = row;
    row += place.count;
    open.to_come -= place.count;
    append(open.bucket, index);
    const std::int64_t count = open.bucket.count;
    const auto wire_bytes = static_cast<std::int64_t>(size_bytes(open.bucket.wire_dtype));
    if (open.to_come == 0 || count * wire_bytes < bucket_bytes_) return;
    const std::int64_t longest = *std::ranges::max_element(open.rows);
    if (count >= open.most || 4 * count >= 3 * longest * layout_.shard_size_) close_whole(open);
  }

  void close_whole(Open& open) {
    const Bucket join = std::exchange(open.bucket, {});
    const std::vector<std::int64_t> begins = windows_of(open.rows, join.wire_dtype);
    require_room(std::ssize(begins));
    std::ranges::fill(open.rows, 0);
    std::vector<Bucket>& buckets = layout_.buckets_;
    const auto first = static_cast<int>(buckets.size());
    buckets.resize(buckets.size() + begins.size(), {join.group, join.wire_dtype, 0, {}});
    layout_.row_begins_.insert(layout_.row_begins_.end(), begins.begin(), begins.end());
    const auto window_at = [&](std::int64_t offset) {
      return static_cast<int>(std::ranges::upper_bound(begins, offset) - begins.begin()) - 1;
    };
    for (const int index : join.parameters) {
      Place& place = layout_.places_[static_cast<std::size_t>(index)];
      const int from = window_at(place.join_offset);
      const std::int64_t last = place.join_offset + std::max<std::int64_t>(place.count, 1) - 1;
      place.join = first;
      place.first_bucket = first + from;
      place.bucket_count = window_at(last) - from + 1;
      for (int b = place.first_bucket; b < place.first_bucket + place.bucket_count; ++b) {
        Bucket& bucket = buckets[static_cast<std::size_t>(b)];
        bucket.parameters.push_back(index);
        bucket.count += layout_.part(index, place.owner, b).count;
      }
    }
    for (std::size_t b = static_cast<std::size_t>(first); b < buckets.size(); ++b) {
      buckets[b].parameters.shrink_to_fit();
    }
  }

  // Where the buckets of a join begin in its rows. Where short rows have ended, the long ones
  // continue in wider windows.
  [[nodiscard]] std::vector<std::int64_t> windows_of(std::vector<std::int64_t> rows,
                                                     Dtype wire_dtype) const {
    std::ranges::sort(rows);
    std::vector<std::int64_t> begins{0};
    while (true) {
      const std::int64_t begin = begins.back();
      const auto ended = std::ranges::upper_bound(rows, begin) - rows.begin();
      const auto going = static_cast<int>(std::ssize(rows) - ended);
      if (going == 0) break;
      // Each of a row's two cuts may be off by half a multiple.
      const std::int64_t widest = window_size(wire_dtype, going);
      const std::int64_t multiple = layout_.multiple_;
      const std::int64_t window = multiple > 1 ? std::max(widest - multiple, multiple) : widest;
      if (begin + window >= rows.back()) break;
      begins.push_back(begin + window);
      require_room(std::ssize(begins));
    }
    return begins;
  }

  void close(Bucket& open) {
    require_room(1);
    open.parameters.shrink_to_fit();
    for (const int index : open.parameters) {
      Place& place = layout_.places_[static_cast<std::size_t>(index)];
      if (layout_.kind_ == Layout::kFlat) place.range = flat_range(open.count);
      place.join = place.first_bucket = static_cast<int>(layout_.buckets_.size());
      place.bucket_count = 1;
    }
    layout_.buckets_.push_back(std::exchange(open, {}));
  }

  [[nodiscard]] std::int64_t flat_range(std::int64_t count) const {
    const int size = layout_.shard_size_;
    return layout_.multiple_ > 1 ? ceil_div(count, size) : even_range(count, size);
  }

  // A large parameter is a join by itself, in several buckets: bucket k is window k of all slices.
  void add_windows(int index) {
    const LayoutParameter& parameter = layout_.parameter(index);
    Place& place = layout_.places_[static_cast<std::size_t>(index)];
    Bucket whole{parameter.group, parameter.wire_dtype, place.count, {index}};
    close(whole);
    const RowCut cut = layout_.slices(index);
    place.window = window_size(parameter.wire_dtype, layout_.shard_size_);
    const std::int64_t bucket_count = ceil_div(cut.longest(), place.window);
    layout_.buckets_.pop_back();
    require_room(bucket_count);
    place.bucket_count = static_cast<int>(bucket_count);
    for (int k = 0; k < place.bucket_count; ++k) {
      Bucket window{parameter.group, parameter.wire_dtype, 0, {index}};
      for (int r = 0; r < cut.size(); ++r) {
        window.count += std::clamp<std::int64_t>(cut.length(r) - k * place.window, 0, place.window);
      }
      layout_.buckets_.push_back(std::move(window));
    }
  }

  void require_room(std::int64_t bucket_count) const {
    if (std::ssize(layout_.buckets_) + bucket_count <= kMostBuckets) return;
    throw UsageError({.where = "bucket layout",
                      .expected = "at most " + std::to_string(kMostBuckets) + " buckets",
                      .got = "more with bucket_bytes=" + std::to_string(bucket_bytes_),
                      .remedy = "raise bucket_bytes"});
  }

  [[nodiscard]] std::int64_t window_size(Dtype wire_dtype, int row_count) const {
    const std::int64_t multiple = layout_.multiple_;
    const std::int64_t row_bytes = bucket_bytes_ / row_count;
    std::int64_t window =
        std::max<std::int64_t>(1, row_bytes / static_cast<std::int64_t>(size_bytes(wire_dtype)));
    const std::int64_t unit = multiple > 1 ? multiple : kAlignedElements;
    if (window >= unit) window -= window % unit;
    return std::max(window, multiple);
  }

  BucketLayout& layout_;
  std::int64_t bucket_bytes_;
  std::map<Kind, Open> open_;
  std::vector<int> owners_;  // whole: per parameter
};

BucketLayout::BucketLayout(std::span<const LayoutParameter> parameters, int shard_size,
                           Layout layout, std::int64_t bucket_bytes, std::int64_t slice_multiple)
    : shard_size_(shard_size),
      kind_(layout),
      multiple_(layout == Layout::kDim0 ? 1 : slice_multiple),
      parameters_(parameters.begin(), parameters.end()) {
  require_positive("bucket_bytes", bucket_bytes);
  require_positive("a slice_multiple", slice_multiple);
  Builder builder(*this, bucket_bytes);
  if (kind_ == Layout::kWhole) builder.deal_whole();
  for (int p = 0; p < parameter_count(); ++p) builder.add(p);
  builder.finish();
}

}  // namespace hsdp
