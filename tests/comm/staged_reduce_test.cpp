// Reductions of private memory where tiles and windows end, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "hsdp/comm/host/tile_plan.h"
#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {
namespace {

using comm::ElementRun;
using comm::TilePlan;

// The most elements that one tile of a group of `size` holds, by asking.
std::int64_t elements_per_tile(Dtype dtype) {
  std::int64_t low = 1;
  std::int64_t high = std::int64_t{1} << 30;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (TilePlan({{0, middle}}, size_bytes(dtype)).tiles() == 1 ? low : high) = middle;
  }
  return low;
}

std::vector<std::int64_t> counts_around_tiles(Dtype dtype) {
  const std::int64_t tile = elements_per_tile(dtype);
  return {0, 1, tile - 1, tile, tile + 1, 2 * tile + 1};
}

std::vector<ElementRun> slices_of(const RowCut& cut) {
  std::vector<ElementRun> slices;
  for (int r = 0; r < cut.size(); ++r) slices.push_back({cut.begin(r), cut.length(r)});
  return slices;
}

// Even; one rank has all; nothing, one, most, a little.
std::vector<RowCut> cuts(std::int64_t count, int size) {
  const auto ranks = static_cast<std::size_t>(size);
  std::vector<std::int64_t> last(ranks + 1, 0);
  last.back() = count;
  std::vector<std::int64_t> ragged(ranks + 1, count - count / 9);
  ragged[0] = ragged[1] = 0;
  if (size > 2) ragged[2] = std::min<std::int64_t>(count, 1);
  ragged.back() = count;
  std::ranges::sort(ragged);
  return {RowCut(count, size), RowCut(last), RowCut(ragged)};
}

TEST(TilePlan, CoversEverySliceOnceWithinTheTile) {
  for (const int size : {1, 2, 5, 64, 1000}) {
    for (const std::size_t element_bytes : {2U, 4U, 8U}) {
      for (const std::int64_t count : {0, 1, 31, 1'000, 98'304, 98'305, 1'000'003}) {
        for (const RowCut& cut : cuts(count, size)) {
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
  // The sum in ascending rank, of rows rounded as they travel.
  static float sum_of(std::int64_t i, Dtype dtype, int exponent = 0) {
    float sum = round_to(dtype, std::ldexp(noise(0, i), -exponent));
    for (int r = 1; r < GetParam(); ++r) {
      sum += round_to(dtype, std::ldexp(noise(r, i), -exponent));
    }
    return sum;
  }
};

void fill_noise(TensorView view, int rank) {
  for (std::int64_t i = 0; i < view.count; ++i) set(view, i, noise(rank, i));
}

TEST_P(Staged, ReduceScatterAcrossTilesAndRaggedCuts) {
  run([](Communicator& world) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
      for (const std::int64_t count : counts_around_tiles(dtype)) {
        const Memory in(world, Path::kPrivate, count, dtype);
        fill_noise(in.view(), world.rank());
        for (const RowCut& cut : cuts(count, world.size())) {
          const Memory out(world, Path::kPrivate, cut.length(world.rank()), Dtype::kF32);
          for (std::int64_t i = 0; i < out.view().count; ++i) set(out.view(), i, noise(9, i));
          world.reduce_scatter({.in = in.view(),
                                .out = out.view(),
                                .cut = cut,
                                .accumulate = true,
                                .sum_exponent = 2,
                                .divisor = 3.0F});
          const std::int64_t begin = cut.begin(world.rank());
          for (std::int64_t i = 0; i < out.view().count; ++i) {
            const float expected = (noise(9, i) + sum_of(begin + i, dtype) * 4.0F) / 3.0F;
            ASSERT_EQ(get(out.view(), i), expected) << name(dtype) << " " << i << " of " << count;
          }
        }
      }
    }
  });
}

TEST_P(Staged, AllReduceAcrossTilesOnEveryWire) {
  run([](Communicator& world) {
    for (const Dtype wire : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      const int k = wire == Dtype::kF16 ? 2 : 0;
      const int total_k = wire == Dtype::kF16 ? 4 : 0;
      for (const std::int64_t count : counts_around_tiles(wire)) {
        const Memory data(world, Path::kPrivate, count, Dtype::kF32);
        fill_noise(data.view(), world.rank());
        world.all_reduce({.data = data.view(),
                          .wire = wire,
                          .send_exponent = k,
                          .total_exponent = total_k,
                          .divisor = 3.0F});
        for (std::int64_t i = 0; i < count; ++i) {
          const float total = round_to(wire, std::ldexp(sum_of(i, wire, k), k - total_k));
          ASSERT_EQ(get(data.view(), i), std::ldexp(total, total_k) / 3.0F)
              << name(wire) << " " << i << " of " << count;
        }
      }
    }
  });
}

TEST_P(Staged, WideDtypesAcrossTiles) {
  run([](Communicator& world) {
    for (const Dtype dtype : {Dtype::kF64, Dtype::kI64}) {
      for (const std::int64_t count : counts_around_tiles(dtype)) {
        const Memory data(world, Path::kPrivate, count, dtype);
        const auto value = [&](int r, std::int64_t i) {
          return static_cast<double>(i * 1'000'003 + r * 17);
        };
        for (std::int64_t i = 0; i < count; ++i) set(data.view(), i, value(world.rank(), i));
        world.all_reduce(data.view());
        for (std::int64_t i = 0; i < count; ++i) {
          double sum = 0.0;
          for (int r = 0; r < world.size(); ++r) sum += value(r, i);
          ASSERT_EQ(get(data.view(), i), sum) << name(dtype) << " " << i << " of " << count;
        }
      }
    }
  });
}

// Only the last tile of one slice is not finite, and only some ranks ask.
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
      for (std::int64_t i = 0; i < count; ++i) set(data, i, small_integer(world.rank(), i + round));
      world.all_reduce(data);
      for (std::int64_t i = 0; i < count; ++i) {
        double sum = 0.0;
        for (int r = 0; r < world.size(); ++r) sum += small_integer(r, i + round);
        ASSERT_EQ(get(data, i), sum) << "round " << round << " element " << i;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Host, Staged, testing::Range(2, 6));

}  // namespace
}  // namespace hsdp::test
