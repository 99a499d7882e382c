// How messages are cut into tiles, and calls that need several tiles. The contract covers the bits
// at the ends of tiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "hsdp/comm/host/tile_plan.h"
#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {
namespace {

using comm::ElementRun;
using comm::TilePlan;

// Finds the largest number of elements that one tile of a small group holds.
std::int64_t elements_per_tile(Dtype dtype) {
  std::int64_t low = 1;
  std::int64_t high = std::int64_t{1} << 30;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (TilePlan({{0, middle}}, size_bytes(dtype)).tiles() == 1 ? low : high) = middle;
  }
  return low;
}

std::vector<ElementRun> slices_of(const RowCut& cut) {
  std::vector<ElementRun> slices;
  for (int r = 0; r < cut.size(); ++r) slices.push_back({cut.begin(r), cut.length(r)});
  return slices;
}

TEST(TilePlan, CoversEverySliceOnceWithinTheTile) {
  for (const int size : {1, 2, 5, 64, 1000}) {
    for (const std::size_t element_bytes : {2U, 4U, 8U}) {
      for (const std::int64_t count : {0, 1, 31, 1'000, 98'304, 98'305, 1'000'003}) {
        for (const RowCut& cut : row_cuts(count, size)) {
          const TilePlan plan(slices_of(cut), element_bytes);
          std::vector<std::int64_t> covered(static_cast<std::size_t>(size));
          for (std::int64_t tile = 0; tile < plan.tiles(); ++tile) {
            std::size_t end = 0;
            for (int r = 0; r < size; ++r) {
              const TilePlan::Window window = plan.window(r, tile);
              std::int64_t& done = covered[static_cast<std::size_t>(r)];
              ASSERT_EQ(window.begin, cut.begin(r) + done);
              ASSERT_GE(window.count, 0);
              ASSERT_EQ(window.offset % 64, 0U);
              ASSERT_GE(window.offset, end);
              if (window.count > 0) {
                end = window.offset + static_cast<std::size_t>(window.count) * element_bytes;
              }
              done += window.count;
            }
            ASSERT_LE(end, TilePlan::tile_bytes(size));
          }
          for (int r = 0; r < size; ++r) {
            ASSERT_EQ(covered[static_cast<std::size_t>(r)], cut.length(r)) << count << " " << size;
          }
        }
      }
    }
  }
}

TEST(TilePlan, ATileTakesWhatItCan) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32, Dtype::kF64}) {
    const std::int64_t tile = elements_per_tile(dtype);
    EXPECT_EQ(TilePlan({{0, tile / 2}, {tile / 2, tile - tile / 2}}, size_bytes(dtype)).tiles(), 1);
    EXPECT_EQ(TilePlan({{0, tile}, {tile, 1}}, size_bytes(dtype)).tiles(), 2);
    EXPECT_LE(static_cast<std::size_t>(tile) * size_bytes(dtype), TilePlan::tile_bytes(1));
  }
}

TEST(TilePlan, ManyRanksGetWholePages) {
  for (const int size : {2, 32, 64, 300}) {
    const std::int64_t count = std::int64_t{1} << 22;
    const TilePlan plan(slices_of(RowCut(count, size)), sizeof(float));
    const auto window_bytes = static_cast<std::size_t>(plan.window(0, 0).count) * sizeof(float);
    EXPECT_GE(window_bytes, std::size_t{4096}) << size;
    const std::int64_t tile = std::max<std::int64_t>(128 << 10, size * 4096) / 4;
    EXPECT_EQ(plan.tiles(), (count + tile - 1) / tile) << size;
  }
}

class Staged : public testing::TestWithParam<int> {
 protected:
  static void run(const std::function<void(Communicator&)>& body) {
    run_world({.size = GetParam(), .path = Path::kPrivate}, body);
  }
};

// Only the last tile of one slice is non-finite, and only some ranks ask.
TEST_P(Staged, NonfiniteTotalsOfAnyTileReachThoseWhoAsk) {
  run([](Communicator& world) {
    for (const Dtype wire : {Dtype::kF32, Dtype::kF16}) {
      const std::int64_t count = 3 * elements_per_tile(wire) + 5;
      for (const std::int64_t place : {std::int64_t{0}, count / 2, count - 1}) {
        const Memory data(world, Path::kPrivate, count, Dtype::kF32);
        set(data.view(), place, world.rank() == 1 ? INFINITY : 1.0F);
        std::atomic<std::uint32_t> flag{0};
        world.all_reduce(
            {.data = data.view(), .wire = wire, .nonfinite = world.rank() == 1 ? nullptr : &flag});
        EXPECT_EQ(flag.load(), world.rank() == 1 ? 0U : 1U) << name(wire) << " at " << place;
      }
    }
  });
}

TEST_P(Staged, CallsOfManySizesAndKindsOfMemoryFollowEachOther) {
  run([](Communicator& world) {
    const std::int64_t most = 2 * elements_per_tile(Dtype::kF32) + 1;
    const Memory own(world, Path::kPrivate, most, Dtype::kF32);
    const Memory shared(world, Path::kDirect, most, Dtype::kF32);
    for (int round = 0; round < 24; ++round) {
      const bool uses_shared = (round + world.rank()) % 3 == 0 || round % 8 == 0;
      const std::int64_t count = round % 4 == 3 ? most : 1 + round * 37;
      const TensorView data = (uses_shared ? shared : own).view().slice(0, count);
      SCOPED_TRACE(round);
      fill(data, [&](std::int64_t i) { return small_integer(world.rank(), i + round); });
      world.all_reduce(data);
      expect_elements(data, [&](std::int64_t i) {
        double sum = 0.0;
        for (int r = 0; r < world.size(); ++r) sum += small_integer(r, i + round);
        return sum;
      });
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Host, Staged, testing::Range(2, 6));

}  // namespace
}  // namespace hsdp::test
