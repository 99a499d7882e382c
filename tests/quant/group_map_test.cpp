#include "quant/group_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <utility>

#include "hsdp/error.h"
#include "quant/quantize_tile.h"
#include "quantize_setting.h"

namespace hsdp::quant {
namespace {

// Parameter, offset in it, place in the bucket, elements, owner.
using OneGroup = std::array<std::int64_t, 5>;

// The row of a cut that contains an element.
int row_of(const RowCut& cut, std::int64_t element) {
  int row = 0;
  while (element >= cut.begin(row) + cut.length(row)) ++row;
  return row;
}

// Element by element: a new group begins with every run and at every multiple of the size. Without
// a cut the groups are dealt out to the owners.
std::vector<OneGroup> groups_by_element(const std::vector<ParameterRange>& runs, int size,
                                        int owners, const std::optional<RowCut>& cut) {
  std::int64_t total = 0;
  for (const ParameterRange& run : runs) total += run.count;
  const std::int64_t row = (total + owners - 1) / owners;
  std::vector<OneGroup> groups;
  std::int64_t position = 0;
  for (const ParameterRange& run : runs) {
    for (std::int64_t i = 0; i < run.count; ++i, ++position) {
      if (i == 0 || (run.flat_offset + i) % size == 0) {
        groups.push_back({run.parameter, run.flat_offset + i, run.offset + i, 0,
                          cut ? row_of(*cut, run.offset + i) : position / row});
      }
      ++groups.back()[3];
    }
  }
  return groups;
}

// Cuts the bucket's memory over owners, some of which get nothing, and cuts the runs there.
RowCut cut_over(int owners, std::vector<ParameterRange>& runs, std::mt19937& random) {
  const auto end = static_cast<unsigned>(runs.back().offset + runs.back().count);
  std::vector<std::int64_t> offsets{0, end};
  while (std::ssize(offsets) <= owners) offsets.push_back(random() % (end + 1));
  std::ranges::sort(offsets);
  std::vector<ParameterRange> parts;
  for (ParameterRange run : runs) {
    for (const std::int64_t offset : offsets) {
      const std::int64_t count = offset - run.offset;
      if (count <= 0 || count >= run.count) continue;
      parts.push_back(run);
      parts.back().count = count;
      run.offset += count;
      run.flat_offset += count;
      run.count -= count;
    }
    parts.push_back(run);
  }
  runs = parts;
  return RowCut(std::move(offsets));
}

TEST(GroupMap, CutsRunsIntoTheGroupsThatTheRuleSays) {
  std::mt19937 random(3);
  for (int round = 0; round < 800; ++round) {
    const int size = std::vector{32, 64, 96, 128, 1024, 4096}[random() % 6];
    const int owners = 1 + static_cast<int>(random() % 8);
    std::vector<ParameterRange> runs = some_runs(random, size);
    std::optional<RowCut> cut;
    if (round % 2 == 1) cut = cut_over(owners, runs, random);
    const GroupMap map = cut ? GroupMap(runs, size, *cut) : GroupMap(runs, size, owners);
    ASSERT_EQ(map.owners(), owners);
    std::vector<OneGroup> found;
    std::int64_t elements = 0;
    std::int64_t int4_bytes = 0;
    std::int64_t int8_bytes = 0;
    for (const GroupTile& tile : map.tiles()) {
      EXPECT_EQ(tile.position, elements);
      EXPECT_EQ(tile.group, std::ssize(found));
      EXPECT_EQ(tile.int4_words * 4LL, int4_bytes);
      EXPECT_EQ(tile.int8_words * 4LL, int8_bytes);
      const std::int32_t groups = group_count(tile, size);
      EXPECT_LE(std::int64_t{groups} * size, kTileElements);
      for (std::int32_t g = 0; g < groups; ++g) {
        const TileGroup group = group_of(tile, size, g);
        found.push_back({tile.parameter, tile.flat_offset + group.begin, tile.element + group.begin,
                         group.count, tile.owner});
        int4_bytes += code_bytes(Code::kInt4, group.count);
        int8_bytes += code_bytes(Code::kInt8, group.count);
      }
      elements += tile.count;
    }
    ASSERT_EQ(found, groups_by_element(runs, size, owners, cut)) << "round " << round;
    EXPECT_EQ(map.element_count(), elements);
    EXPECT_EQ(map.group_count(), std::ssize(found));
    std::size_t tiles = 0;
    for (int owner = 0; owner < owners; ++owner) {
      for (const GroupTile& tile : map.tiles(owner)) EXPECT_EQ(tile.owner, owner);
      tiles += map.tiles(owner).size();
    }
    EXPECT_EQ(tiles, map.tiles().size());
  }
}

TEST(GroupMap, HasNothingWhereThereIsNothing) {
  const GroupMap map({}, 64, 3);
  EXPECT_EQ(map.group_count(), 0);
  EXPECT_EQ(MessageLayout(map, {}).cut().count(), 0);
  EXPECT_TRUE(map.tiles(2).empty());
}

// Whole groups take 0.53125 bytes an element, with bf16 scales for 64 elements or fp32 scales for
// 128.
TEST(MessageLayout, SizesFollowTheFormula) {
  const std::vector<ParameterRange> runs{{.count = 131072}};
  for (const GroupFormat& format :
       {GroupFormat{}, GroupFormat{.group_size = 128, .scale_dtype = Dtype::kF32}}) {
    EXPECT_EQ(MessageLayout(GroupMap(runs, format.group_size, 1), format).cut().count(), 69632);
  }
  const std::vector<ParameterRange> odd{{.count = 5, .flat_offset = 62}};
  const GroupMap map(odd, 64, 1);  // groups of 2 and 3
  EXPECT_EQ(MessageLayout(map, {}).cut().count(), 16 + 16);
  EXPECT_EQ(MessageLayout(map, {.code = Code::kBf16}).cut().count(), 10);
  EXPECT_EQ(MessageLayout(map, {.code = Code::kInt8, .scale_dtype = Dtype::kF32}).cut().count(),
            16 + 16);
}

TEST(GroupFormat, RefusesWhatItCannotBe) {
  for (const int size : {0, 16, 33, 8192, -64}) {
    EXPECT_THROW(require_valid({.group_size = size}), UsageError) << size;
  }
  EXPECT_THROW(require_valid({.scale_dtype = Dtype::kF16}), UsageError);
}

}  // namespace
}  // namespace hsdp::quant
