// Every element has exactly one place in one bucket, in the row of the rank that owns it.
#include "hsdp/bucket_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <set>
#include <utility>
#include <vector>

#include "hsdp/error.h"

namespace hsdp {
namespace {

constexpr std::int64_t kAllInOne = std::int64_t{1} << 30;

std::vector<LayoutParameter> mixed_parameters() {
  return {{.shape = {5, 3}},
          {.shape = {7}, .wire_dtype = Dtype::kBf16},
          {.shape = {2049, 2, 2}},
          {.shape = {0}},
          {.shape = {}},
          {.shape = {300, 3}, .wire_dtype = Dtype::kBf16, .group = 1},
          {.shape = {64}, .group = 1},
          {.shape = {3, 1000}, .wire_dtype = Dtype::kF16},
          {.shape = {1}, .wire_dtype = Dtype::kBf16},
          {.shape = {31, 33}}};
}

struct LayoutCase {
  int shard_size = 1;
  Layout layout = Layout::kFlat;
  std::int64_t bucket_bytes = 0;
  std::int64_t slice_multiple = 1;
};

void PrintTo(const LayoutCase& row, std::ostream* out) {
  *out << name(row.layout) << ", " << row.shard_size << " ranks, " << row.bucket_bytes << " bytes";
}

std::string case_name(const testing::TestParamInfo<LayoutCase>& info) {
  return std::string(name(info.param.layout)) + "_" + std::to_string(info.param.shard_size) +
         "_ranks_" + std::to_string(info.param.bucket_bytes) + "_bytes_by_" +
         std::to_string(info.param.slice_multiple);
}

std::vector<LayoutCase> every_case() {
  std::vector<LayoutCase> cases;
  for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    for (int shard_size = 1; shard_size <= 8; ++shard_size) {
      for (const std::int64_t bucket_bytes :
           {std::int64_t{1} << 10, std::int64_t{5000}, kAllInOne}) {
        cases.push_back({shard_size, layout, bucket_bytes});
        if (layout == Layout::kDim0) continue;
        for (const std::int64_t multiple : {48, 64}) {
          cases.push_back({shard_size, layout, bucket_bytes, multiple});
        }
      }
    }
  }
  return cases;
}

// The cases of these layouts whose buckets are smaller than `bucket_bytes`.
auto cases_of(const std::set<Layout>& layouts, std::int64_t bucket_bytes = 2 * kAllInOne) {
  std::vector<LayoutCase> cases = every_case();
  std::erase_if(cases, [&](const LayoutCase& row) {
    return layouts.count(row.layout) == 0 || row.bucket_bytes >= bucket_bytes;
  });
  return testing::ValuesIn(cases);
}

class EveryLayout : public testing::TestWithParam<LayoutCase> {
 protected:
  [[nodiscard]] std::int64_t count_of(int parameter) const {
    return element_count(parameters_[static_cast<std::size_t>(parameter)].shape);
  }
  [[nodiscard]] std::int64_t total_count() const {
    std::int64_t total = 0;
    for (int p = 0; p < parameter_count(); ++p) total += count_of(p);
    return total;
  }
  [[nodiscard]] int parameter_count() const { return static_cast<int>(parameters_.size()); }
  [[nodiscard]] const Bucket& bucket(int number) const {
    return layout_.buckets()[static_cast<std::size_t>(number)];
  }
  [[nodiscard]] int bucket_count() const { return static_cast<int>(layout_.buckets().size()); }

  std::vector<LayoutParameter> parameters_ = mixed_parameters();
  BucketLayout layout_{parameters_, GetParam().shard_size, GetParam().layout,
                       GetParam().bucket_bytes, GetParam().slice_multiple};
};

TEST_P(EveryLayout, SlicesTileEachParameterInRankOrder) {
  for (int p = 0; p < parameter_count(); ++p) {
    std::int64_t next = 0;
    const RowCut cut = layout_.slices(p);
    ASSERT_EQ(cut.size(), GetParam().shard_size);
    EXPECT_EQ(cut.count(), count_of(p));
    for (int rank = 0; rank < GetParam().shard_size; ++rank) {
      const Slice slice = layout_.slice(p, rank);
      if (slice.count > 0) {
        EXPECT_EQ(slice.offset, next) << "parameter " << p;
      }
      EXPECT_EQ(cut.length(rank), slice.count);
      next += slice.count;
    }
    EXPECT_EQ(next, count_of(p));
  }
}

// Checks for every element of every bucket that the rank of its row owns it, and that the ranges of
// the row agree.
TEST_P(EveryLayout, BucketsAndRowsAgreeOnEveryElement) {
  std::set<std::pair<int, std::int64_t>> seen;  // (parameter, flat element)
  for (int b = 0; b < bucket_count(); ++b) {
    const RowCut rows = layout_.rows(b);
    ASSERT_EQ(rows.size(), GetParam().shard_size);
    ASSERT_EQ(rows.count(), bucket(b).count);
    std::map<std::int64_t, std::pair<int, std::int64_t>> placed;  // by place in the bucket
    for (int rank = 0; rank < rows.size(); ++rank) {
      std::int64_t next = 0;
      for (const ParameterRange& range : layout_.ranges(b, rank)) {
        const Slice slice = layout_.slice(range.parameter, rank);
        ASSERT_EQ(range.offset, next) << "a gap";
        next += range.count;
        ASSERT_GE(range.flat_offset, slice.offset);
        ASSERT_LE(range.flat_offset + range.count, slice.offset + slice.count);
        for (std::int64_t i = 0; i < range.count; ++i) {
          placed[rows.begin(rank) + range.offset + i] = {range.parameter, range.flat_offset + i};
        }
      }
      ASSERT_EQ(next, rows.length(rank));
    }
    std::int64_t covered = 0;
    const std::vector<BucketSegment> segments = layout_.segments(b);
    // A search by parameter index needs this order, and so does sending each rank's slice in order.
    EXPECT_TRUE(std::ranges::is_sorted(segments, {}, [](const BucketSegment& segment) {
      return std::pair(segment.parameter, segment.flat_offset);
    }));
    for (const BucketSegment& segment : segments) {
      for (std::int64_t i = 0; i < segment.count; ++i) {
        const std::pair element(segment.parameter, segment.flat_offset + i);
        ASSERT_EQ(placed.at(segment.bucket_offset + i), element);
        ASSERT_TRUE(seen.insert(element).second) << "element travels twice";
      }
      covered += segment.count;
    }
    ASSERT_EQ(covered, bucket(b).count);
  }
  EXPECT_EQ(std::ssize(seen), total_count());
}

TEST_P(EveryLayout, BucketsHoldOneGroupAndOneWireAndTheirParametersInOrder) {
  std::set<int> listed;
  for (int b = 0; b < bucket_count(); ++b) {
    const Bucket& bucket = this->bucket(b);
    EXPECT_TRUE(std::is_sorted(bucket.parameters.begin(), bucket.parameters.end()));
    EXPECT_EQ(std::adjacent_find(bucket.parameters.begin(), bucket.parameters.end()),
              bucket.parameters.end());
    for (const int p : bucket.parameters) {
      const LayoutParameter& parameter = layout_.parameter(p);
      EXPECT_EQ(parameter.group, bucket.group);
      EXPECT_EQ(parameter.wire_dtype, bucket.wire_dtype);
      listed.insert(p);
    }
    for (const BucketSegment& segment : layout_.segments(b)) {
      EXPECT_TRUE(std::binary_search(bucket.parameters.begin(), bucket.parameters.end(),
                                     segment.parameter));
    }
  }
  EXPECT_EQ(static_cast<int>(listed.size()), parameter_count()) << "the empty one too";
}

TEST_P(EveryLayout, BucketsOfAParameterAreThoseThatListIt) {
  for (int p = 0; p < parameter_count(); ++p) {
    std::vector<int> want;
    for (int b = 0; b < bucket_count(); ++b) {
      if (std::ranges::count(bucket(b).parameters, p) > 0) want.push_back(b);
    }
    const BucketRun got = layout_.buckets_of(p);
    ASSERT_EQ(got.count(), std::ssize(want));
    for (int b = got.first; b < got.end; ++b) {
      EXPECT_EQ(b, want[static_cast<std::size_t>(b - got.first)]);
    }
  }
}

TEST_P(EveryLayout, NoBucketIsLargerThanAskedAndTheWireIsNotPadded) {
  std::int64_t largest = 0;
  std::int64_t travelling = 0;
  for (const Bucket& bucket : layout_.buckets()) {
    const auto bytes = bucket.count * static_cast<std::int64_t>(size_bytes(bucket.wire_dtype));
    // A bucket may exceed the limit to hold one multiple per rank; with whole parameters, whose
    // cuts may be half a multiple off, two.
    const std::int64_t multiples = GetParam().layout == Layout::kWhole ? 2 : 1;
    const std::int64_t least = multiples * GetParam().slice_multiple * GetParam().shard_size * 4;
    EXPECT_LE(bytes, std::max(GetParam().bucket_bytes, least));
    largest = std::max(largest, bytes);
    travelling += bucket.count;
  }
  EXPECT_EQ(layout_.max_bucket_bytes(), largest);
  std::int64_t in_shards = 0;
  for (int r = 0; r < GetParam().shard_size; ++r) in_shards += layout_.shard_count(r);
  EXPECT_EQ(travelling, total_count());
  EXPECT_EQ(in_shards, total_count());
}

class Dim0Layout : public EveryLayout {};
TEST_P(Dim0Layout, GivesWholeRows) {
  const int shard_size = GetParam().shard_size;
  for (int p = 0; p < parameter_count(); ++p) {
    const Shape& shape = parameters_[static_cast<std::size_t>(p)].shape;
    const std::int64_t rows = shape.empty() ? 1 : shape[0];
    const std::int64_t row_size = rows == 0 ? 0 : count_of(p) / rows;
    const std::int64_t c = (rows + shard_size - 1) / shard_size;
    for (int rank = 0; rank < shard_size; ++rank) {
      const std::int64_t begin = std::min(rank * c, rows);
      const std::int64_t end = std::min((rank + 1) * c, rows);
      EXPECT_EQ(layout_.slice(p, rank).count, (end - begin) * row_size)
          << "parameter " << p << ", rank " << rank;
    }
  }
}

class WholeLayout : public EveryLayout {};
TEST_P(WholeLayout, GivesEachParameterToOneRankAndTheRanksAboutAsMuch) {
  std::int64_t longest = 0;
  for (int p = 0; p < parameter_count(); ++p) {
    std::int64_t owners = 0;
    for (int rank = 0; rank < GetParam().shard_size; ++rank) {
      owners += layout_.slice(p, rank).count == count_of(p) ? 1 : 0;
    }
    if (count_of(p) > 0) {
      EXPECT_EQ(owners, 1) << "parameter " << p;
    }
    longest = std::max(longest, count_of(p));
  }
  std::int64_t least = layout_.shard_count(0);
  std::int64_t most = least;
  for (int rank = 1; rank < GetParam().shard_size; ++rank) {
    least = std::min(least, layout_.shard_count(rank));
    most = std::max(most, layout_.shard_count(rank));
  }
  EXPECT_LE(most - least, longest);
}

// A slice must be contiguous in the carry.
TEST_P(EveryLayout, RowsGoOnWhereThoseOfTheBucketBeforeEnded) {
  std::map<int, std::int64_t> next;  // by parameter: where its slice on rank 0 continues
  for (int b = 0; b < bucket_count(); ++b) {
    if (!layout_.goes_on(b)) next.clear();
    for (const ParameterRange& range : layout_.ranges(b, 0)) {
      const Slice slice = layout_.slice(range.parameter, 0);
      const bool begins = next.count(range.parameter) == 0;
      EXPECT_EQ(range.flat_offset, begins ? slice.offset : next[range.parameter]);
      if (!begins) {
        EXPECT_EQ(range.offset, 0) << "something lies between";
      }
      next[range.parameter] = range.flat_offset + range.count;
    }
  }
}

class SplittingFlatLayout : public EveryLayout {};
TEST_P(SplittingFlatLayout, CutsALargeParameterEvenly) {
  constexpr int kLarge = 2;
  ASSERT_GT(count_of(kLarge) * 4, GetParam().bucket_bytes) << "joined with others";
  const std::int64_t even = (count_of(kLarge) + GetParam().shard_size - 1) / GetParam().shard_size;
  for (int rank = 0; rank < GetParam().shard_size; ++rank) {
    const std::int64_t multiple = GetParam().slice_multiple;
    const std::int64_t most = multiple > 1 ? even + multiple : (even + 31) / 32 * 32;
    EXPECT_LE(layout_.slice(kLarge, rank).count, most);
  }
}

class CuttingLayout : public EveryLayout {};
TEST_P(CuttingLayout, CutsAtMultiplesOfTheFlattenedParameterOrAtItsEnd) {
  const auto fits = [this](int parameter, std::int64_t offset) {
    return offset % GetParam().slice_multiple == 0 || offset == count_of(parameter);
  };
  for (int b = 0; b < bucket_count(); ++b) {
    for (int rank = 0; rank < GetParam().shard_size; ++rank) {
      for (const ParameterRange& range : layout_.ranges(b, rank)) {
        EXPECT_TRUE(fits(range.parameter, range.flat_offset)) << range.flat_offset;
        EXPECT_TRUE(fits(range.parameter, range.flat_offset + range.count)) << range.count;
      }
    }
  }
}

TEST_P(EveryLayout, CountsTheElementsOfNeighbouringRows) {
  for (int b = 0; b < bucket_count(); ++b) {
    const RowCut rows = layout_.rows(b);
    for (int first = 0; first < rows.size(); ++first) {
      for (int count = 0; first + count <= rows.size(); ++count) {
        EXPECT_EQ(layout_.count_of(b, first, count), rows.begin(first + count) - rows.begin(first));
      }
    }
  }
}

TEST_P(EveryLayout, IsTheSameEveryTime) {
  const BucketLayout again(parameters_, GetParam().shard_size, GetParam().layout,
                           GetParam().bucket_bytes, GetParam().slice_multiple);
  ASSERT_EQ(again.buckets().size(), layout_.buckets().size());
  for (int b = 0; b < bucket_count(); ++b) {
    const RowCut a = again.rows(b);
    const RowCut o = layout_.rows(b);
    EXPECT_TRUE(std::ranges::equal(a.offsets(), o.offsets()));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, EveryLayout, testing::ValuesIn(every_case()), case_name);
INSTANTIATE_TEST_SUITE_P(Layouts, CuttingLayout, cases_of({Layout::kFlat, Layout::kWhole}),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Layouts, WholeLayout, cases_of({Layout::kWhole}), case_name);
INSTANTIATE_TEST_SUITE_P(Layouts, Dim0Layout, cases_of({Layout::kDim0}), case_name);
INSTANTIATE_TEST_SUITE_P(Layouts, SplittingFlatLayout, cases_of({Layout::kFlat}, kAllInOne),
                         case_name);

TEST(BucketLayout, ClassesNeverShareABucket) {
  std::vector<LayoutParameter> parameters(12, LayoutParameter{.shape = {10}});
  for (std::size_t p = 0; p < parameters.size(); p += 3) parameters[p].bucket_class = 1;
  const BucketLayout layout(parameters, 2, Layout::kFlat, kAllInOne);
  ASSERT_EQ(layout.buckets().size(), 2U);
  for (const Bucket& bucket : layout.buckets()) {
    for (const int p : bucket.parameters) {
      EXPECT_EQ(p % 3 == 0, bucket.parameters.front() % 3 == 0) << p;
    }
  }
}

// A large parameter is cut into windows; each small parameter fills a bucket.
TEST(BucketLayout, RefusesMoreBucketsThanMemoryHolds) {
  constexpr int kMost = 1 << 20;
  constexpr Layout kLayouts[] = {Layout::kFlat, Layout::kDim0, Layout::kWhole};
  const auto refusal = [](const std::vector<LayoutParameter>& parameters, Layout layout) {
    try {
      const BucketLayout made(parameters, 1, layout, 1);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string expected =
      "bucket layout: expected at most 1048576 buckets, got more with bucket_bytes=1; raise "
      "bucket_bytes";
  const std::vector<LayoutParameter> large{{.shape = {7'000'000'000}}};
  for (const Layout layout : kLayouts) EXPECT_EQ(refusal(large, layout), expected) << name(layout);
  std::vector<LayoutParameter> small(kMost);
  for (const Layout layout : kLayouts) EXPECT_EQ(refusal(small, layout), "") << name(layout);
  small.emplace_back();
  for (const Layout layout : kLayouts) EXPECT_EQ(refusal(small, layout), expected) << name(layout);
}

// Otherwise a unit's elements would not be spread over all ranks, and its buckets would move.
TEST(BucketLayout, UnitsNeverShareABucket) {
  std::vector<LayoutParameter> parameters(12, LayoutParameter{.shape = {10}});
  for (std::size_t p = 0; p < parameters.size(); ++p) parameters[p].unit = static_cast<int>(p / 4);
  for (const Layout kind : {Layout::kFlat, Layout::kDim0}) {
    const BucketLayout layout(parameters, 2, kind, kAllInOne);
    ASSERT_EQ(layout.buckets().size(), 3U);
    for (int b = 0; b < 3; ++b) {
      EXPECT_THAT(layout.buckets()[static_cast<std::size_t>(b)].parameters,
                  testing::ElementsAre(4 * b, (4 * b) + 1, (4 * b) + 2, (4 * b) + 3));
    }
  }
}

// The imbalance that a codec with groups of 64 causes, for many parameters of many sizes.
TEST(BucketLayout, SliceMultiplesCostLittleBalance) {
  std::vector<LayoutParameter> parameters;
  for (int p = 0; p < 300; ++p) parameters.push_back({.shape = {4096 + 517 * (p % 31), 11}});
  constexpr int kRanks = 64;
  const BucketLayout layout(parameters, kRanks, Layout::kFlat, 32 << 20, 64);
  std::int64_t total = 0;
  std::int64_t most = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    total += layout.shard_count(rank);
    most = std::max(most, layout.shard_count(rank));
  }
  EXPECT_LT(static_cast<double>(most * kRanks) / static_cast<double>(total), 1.01);
}

TEST(BucketLayout, RefusesNumbersThatThereAreNot) {
  EXPECT_THROW(BucketLayout(mixed_parameters(), 2, Layout::kFlat, 1 << 10, 0), UsageError);
  const BucketLayout layout(mixed_parameters(), 2, Layout::kFlat, 1 << 10);
  const int buckets = static_cast<int>(layout.buckets().size());
  for (const int parameter : {-1, layout.parameter_count()}) {
    EXPECT_THROW(static_cast<void>(layout.parameter(parameter)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.slice(parameter, 0)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.slices(parameter)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.buckets_of(parameter)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.join_of(parameter)), UsageError);
  }
  for (const int rank : {-1, 2}) {
    EXPECT_THROW(static_cast<void>(layout.slice(0, rank)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.shard_count(rank)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.ranges(0, rank)), UsageError);
  }
  for (const int bucket : {-1, buckets}) {
    EXPECT_THROW(static_cast<void>(layout.goes_on(bucket)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.rows(bucket)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.ranges(bucket, 0)), UsageError);
    EXPECT_THROW(static_cast<void>(layout.segments(bucket)), UsageError);
  }
}

TEST(BucketLayout, AllInOneMakesOneBucketPerGroupAndWire) {
  const std::vector<LayoutParameter> parameters = mixed_parameters();
  const BucketLayout layout(parameters, 2, Layout::kFlat, kAllInOne);
  // Group 0: f32, bf16, f16. Group 1: f32, bf16.
  EXPECT_EQ(layout.buckets().size(), 5U);
}

TEST(BucketLayout, JoinsSmallParametersAndSplitsLargeOnes) {
  const std::vector<LayoutParameter> small(16, LayoutParameter{.shape = {16}});
  EXPECT_EQ(BucketLayout(small, 2, Layout::kFlat, 256).buckets().size(), 4U);
  const std::vector<LayoutParameter> large(1, LayoutParameter{.shape = {1 << 16}});
  EXPECT_EQ(BucketLayout(large, 2, Layout::kFlat, 1 << 14).buckets().size(), 16U);
}

// The parameters of a transformer: a head, layers and an embedding, each matrix with a bias.
std::vector<LayoutParameter> transformer(int layers, std::int64_t width, std::int64_t words) {
  std::vector<LayoutParameter> parameters;
  const auto add = [&](std::int64_t rows, std::int64_t columns) {
    parameters.push_back({.shape = {rows, columns}});
    parameters.push_back({.shape = {rows}});
  };
  add(words, width);
  for (int i = 0; i < layers; ++i) {
    add(width, 4 * width);
    add(4 * width, width);
    for (int k = 0; k < 4; ++k) add(width, width);
  }
  add(words, width);
  return parameters;
}

TEST(BucketLayout, WholeParametersAreSharedEvenlyAndEveryRankHasARow) {
  const std::vector<LayoutParameter> parameters = transformer(24, 64, 1000);
  for (const int ranks : {2, 4, 8}) {
    const BucketLayout layout(parameters, ranks, Layout::kWhole, 100'000);
    EXPECT_LT(layout.balance().elements, 1.02) << ranks;
    EXPECT_LT(layout.balance().traffic, ranks < 8 ? 1.45 : 1.9) << ranks;
  }
}

// A bucket is sent once all of its gradients have come, so they must lie close together.
TEST(BucketLayout, NoBucketOfWholeParametersTakesMoreThanItsPartOfAModel) {
  const std::vector<LayoutParameter> parameters = transformer(24, 64, 3000);  // uneven in any case
  constexpr int kRanks = 8;
  const BucketLayout layout(parameters, kRanks, Layout::kWhole, 100'000);
  std::int64_t total = 0;
  for (const LayoutParameter& one : parameters) total += element_count(one.shape);
  for (const Bucket& bucket : layout.buckets()) {
    std::int64_t between = 0;
    for (int p = bucket.parameters.front(); p < bucket.parameters.back(); ++p) {
      between += element_count(parameters[static_cast<std::size_t>(p)].shape);
    }
    EXPECT_LE(between, total / 4) << "parameter " << bucket.parameters.front();
  }
}

// Neighbours go to different ranks even if their sizes differ.
TEST(BucketLayout, WholeParametersThatAreAlikeAreDealtInTurn) {
  std::vector<LayoutParameter> parameters;
  for (int p = 0; p < 12; ++p) parameters.push_back({.shape = {33000 + 1237 * (p * 11 % 12)}});
  const BucketLayout layout(parameters, 3, Layout::kWhole, 1 << 16);
  EXPECT_LT(layout.balance().elements, 1.1);
  EXPECT_LT(layout.balance().traffic, 1.2);
}

TEST(BucketLayout, BalanceOfEvenSlicesIsOne) {
  const std::vector<LayoutParameter> parameters(4, LayoutParameter{.shape = {64, 64}});
  const BucketLayout layout(parameters, 4, Layout::kFlat, 1 << 20);
  EXPECT_EQ(layout.balance().elements, 1);
  EXPECT_EQ(layout.balance().traffic, 1);
  const BucketLayout alone({{{.shape = {64}}}}, 4, Layout::kWhole, 1 << 20);
  EXPECT_EQ(alone.balance().elements, 4);
  EXPECT_EQ(alone.balance().traffic, 4);
}

TEST(BucketLayout, EvenATinyBucketSizeMakesProgress) {
  const std::vector<LayoutParameter> parameters{{.shape = {100}}, {.shape = {3, 3}}};
  for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    const BucketLayout tiny(parameters, 4, layout, 1);
    std::int64_t total = 0;
    for (const Bucket& bucket : tiny.buckets()) total += bucket.count;
    EXPECT_EQ(total, 109);
  }
}

TEST(BucketLayout, NothingButEmptyParameters) {
  const std::vector<LayoutParameter> parameters{{.shape = {0}}, {.shape = {4, 0}}};
  const BucketLayout layout(parameters, 2, Layout::kFlat, 1 << 10);
  EXPECT_EQ(layout.slice(0, 1).count, 0);
  EXPECT_EQ(layout.shard_count(0), 0);
  for (const Bucket& bucket : layout.buckets()) EXPECT_EQ(bucket.count, 0);
}

}  // namespace
}  // namespace hsdp
