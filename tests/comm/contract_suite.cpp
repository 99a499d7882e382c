// What every engine and transport guarantees its callers, exactly.
#include "tests/comm/contract_suite.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <span>

#include "hsdp/error.h"
#include "tests/comm/elements.h"

namespace hsdp::test {
namespace {

constexpr std::array kWires{Dtype::kF32, Dtype::kBf16, Dtype::kF16};
constexpr std::array kReducible{Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kF64, Dtype::kI64};
constexpr std::array<std::int64_t, 6> kCounts{0, 1, 7, 33, 1000, 70'001};

// Sizes around the tiles in which the host engine reduces.
std::vector<std::int64_t> reduced_counts(Dtype dtype) {
  const std::int64_t tile = (128 << 10) / static_cast<std::int64_t>(size_bytes(dtype));
  return {0, 1, 33, tile - 1, tile, tile + 1, 2 * tile + 1};
}

// Sums over a few ranks are exact: the values are small, or have more digits than fp32 holds.
double integer(Dtype dtype, int rank, std::int64_t i) {
  return size_bytes(dtype) < 8 ? small_integer(rank, i)
                               : static_cast<double>(i * 1'000'003 + rank * 17);
}

void fill_integers(TensorView view, int rank) {
  fill(view, [&](std::int64_t i) { return integer(view.dtype, rank, i); });
}

void expect_integers(TensorView out, std::int64_t first, int ranks) {
  expect_elements(out, [&](std::int64_t i) {
    double sum = 0.0;
    for (int r = 0; r < ranks; ++r) sum += integer(out.dtype, r, first + i);
    return sum;
  });
}

void fill_noise(TensorView view, int rank, std::int64_t first = 0) {
  fill(view, [&](std::int64_t i) { return noise(rank, first + i); });
}

// Element by element, in ascending rank: noise, divided by 2^exponent and rounded for the wire.
std::function<float(std::int64_t i)> sums_of_noise(int ranks, Dtype wire, int exponent = 0) {
  std::vector<float> sums;
  for (std::int64_t i = 0; i < reduced_counts(wire).back(); ++i) {
    const auto sent = [&](int r) { return round_to(wire, std::ldexp(noise(r, i), -exponent)); };
    float sum = sent(0);
    for (int r = 1; r < ranks; ++r) sum += sent(r);
    sums.push_back(sum);
  }
  return [sums](std::int64_t i) { return sums[static_cast<std::size_t>(i)]; };
}

TEST_P(Contract, ReduceScatterIsExactOnIntegers) {
  run([](Communicator& world) {
    for (const Dtype dtype : kReducible) {
      for (const std::int64_t count : reduced_counts(dtype)) {
        const Memory in(world, path(), count, dtype);
        fill_integers(in.view(), world.rank());
        for (const RowCut& cut : row_cuts(count, size())) {
          const Memory out(world, path(), cut.length(world.rank()), dtype);
          world.reduce_scatter({.in = in.view(), .out = out.view(), .cut = cut});
          expect_integers(out.view(), cut.begin(world.rank()), size());
        }
      }
    }
  });
}

TEST_P(Contract, AllReduceIsExactOnIntegers) {
  run([](Communicator& world) {
    for (const Dtype dtype : kReducible) {
      for (const std::int64_t count : reduced_counts(dtype)) {
        const Memory data(world, path(), count, dtype);
        fill_integers(data.view(), world.rank());
        world.all_reduce(data.view());
        expect_integers(data.view(), 0, size());
      }
    }
  });
}

TEST_P(Contract, ReduceScatterWidensAddsScalesAndDivides) {
  run([](Communicator& world) {
    for (const Dtype dtype : kWires) {
      const auto sum = sums_of_noise(size(), dtype);
      for (const std::int64_t count : reduced_counts(dtype)) {
        const Memory in(world, path(), count, dtype);
        fill_noise(in.view(), world.rank());
        for (const RowCut& cut : row_cuts(count, size())) {
          const std::int64_t begin = cut.begin(world.rank());
          const Memory out(world, path(), cut.length(world.rank()), Dtype::kF32);
          fill_noise(out.view(), 99, begin);
          world.reduce_scatter({.in = in.view(),
                                .out = out.view(),
                                .cut = cut,
                                .accumulate = true,
                                .sum_exponent = 3,
                                .divisor = 7.0F});
          expect_elements(out.view(), [&](std::int64_t i) {
            return (noise(99, begin + i) + sum(begin + i) * 8.0F) / 7.0F;
          });
        }
      }
    }
  });
}

TEST_P(Contract, AllReduceRoundsOnceEachWayOnSixteenBitWires) {
  run([](Communicator& world) {
    for (const Dtype wire : kWires) {
      const int k = wire == Dtype::kF16 ? 2 : 0;
      const int total_k = wire == Dtype::kF16 ? 4 : 0;
      const auto sum = sums_of_noise(size(), wire, k);
      for (const std::int64_t count : reduced_counts(wire)) {
        SCOPED_TRACE(name(wire));
        const Memory data(world, path(), count, Dtype::kF32);
        fill_noise(data.view(), world.rank());
        world.all_reduce({.data = data.view(),
                          .wire = wire,
                          .send_exponent = k,
                          .total_exponent = total_k,
                          .divisor = 3.0F});
        expect_elements(data.view(), [&](std::int64_t i) {
          const float total = round_to(wire, std::ldexp(sum(i), k - total_k));
          // A group of one sends nothing and rounds nothing.
          return (size() == 1 ? noise(0, i) : std::ldexp(total, total_k)) / 3.0F;
        });
      }
    }
  });
}

TEST_P(Contract, NonfiniteResultsAreSeenOnEveryRankThatReceivesThem) {
  run([](Communicator& world) {
    const std::int64_t count = 40'000;
    for (const Dtype wire : {Dtype::kF32, Dtype::kF16}) {
      for (const bool poisoned : {false, true}) {
        const Memory data(world, path(), count, Dtype::kF32);
        fill_integers(data.view(), world.rank());
        if (poisoned && world.rank() == size() - 1) set(data.view(), 17, INFINITY);
        std::atomic<std::uint32_t> flag{0};
        world.all_reduce({.data = data.view(), .wire = wire, .nonfinite = &flag});
        EXPECT_EQ(flag.load(), poisoned ? 1U : 0U) << name(wire);
      }
    }
    const Memory in(world, path(), count, Dtype::kF32);
    const RowCut cut(count, size());
    const Memory out(world, path(), cut.length(world.rank()), Dtype::kF32);
    set(in.view(), count - 1, NAN);
    std::atomic<std::uint32_t> flag{0};
    world.reduce_scatter({.in = in.view(), .out = out.view(), .nonfinite = &flag});
    EXPECT_EQ(flag.load(), world.rank() == size() - 1 ? 1U : 0U);
  });
}

TEST_P(Contract, AllGatherJoinsRowsAlsoInPlace) {
  run([](Communicator& world) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF64, Dtype::kU8}) {
      for (const std::int64_t count : kCounts) {
        for (const RowCut& cut : row_cuts(count, size())) {
          for (const bool in_place : {false, true}) {
            const Memory in(world, path(), cut.length(world.rank()), dtype);
            const Memory out(world, path(), count, dtype);
            const std::int64_t begin = cut.begin(world.rank());
            const TensorView row =
                in_place ? out.view().slice(begin, cut.length(world.rank())) : in.view();
            fill(row, [&](std::int64_t i) { return small_integer(5, begin + i); });
            world.all_gather(row, out.view(), Stream::inline_host(), cut);
            expect_elements(out.view(), [](std::int64_t i) { return small_integer(5, i); });
          }
        }
      }
    }
  });
}

// Arbitrary bits, NaNs among them, that tell which rank sent them and from which place.
std::uint8_t any_byte(int rank, std::int64_t i) {
  return static_cast<std::uint8_t>(
      static_cast<std::uint64_t>(i * 8 + rank + 1) * 0x9e3779b97f4a7c15U >> 56U);
}

void expect_transposed(Communicator& world, const Memory& in, const Memory& out,
                       const std::optional<RowCut>& cut) {
  const auto bytes_of = [](const Memory& memory) {
    return std::span(static_cast<std::uint8_t*>(memory.view().data), memory.view().size_in_bytes());
  };
  const auto sent = bytes_of(in);
  for (std::int64_t i = 0; i < std::ssize(sent); ++i) {
    sent[static_cast<std::size_t>(i)] = any_byte(world.rank(), i);
  }
  world.all_to_all(in.view(), out.view(), Stream::inline_host(), cut);
  const auto element = static_cast<std::int64_t>(size_bytes(in.view().dtype));
  const RowCut rows = cut.value_or(RowCut(in.view().count, world.size()));
  std::vector<std::uint8_t> expected;
  for (int r = 0; r < world.size(); ++r) {
    const std::int64_t end = rows.begin(world.rank() + 1) * element;
    for (std::int64_t i = rows.begin(world.rank()) * element; i < end; ++i) {
      expected.push_back(any_byte(r, i));
    }
  }
  ASSERT_TRUE(std::ranges::equal(bytes_of(out), expected))
      << in.view().count << " " << name(in.view().dtype) << (cut ? " with a cut" : "");
}

TEST_P(Contract, AllToAllTransposesRows) {
  run([](Communicator& world) {
    for (const Dtype dtype :
         {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kF64, Dtype::kI64, Dtype::kU8}) {
      for (const std::int64_t count : kCounts) {
        for (const RowCut& cut : row_cuts(count, size())) {
          const Memory in(world, path(), count, dtype);
          const Memory out(world, path(), cut.length(world.rank()) * size(), dtype);
          expect_transposed(world, in, out, cut);
        }
        const Memory in(world, path(), count * size(), dtype);
        const Memory out(world, path(), count * size(), dtype);
        expect_transposed(world, in, out, std::nullopt);
      }
    }
  });
}

// Everything that planned calls leave out from the second time on, including the divisor.
TEST_P(Contract, PlannedCallsAreExactEachTime) {
  run([](Communicator& world) {
    const std::int64_t rows = 5'000;
    const std::int64_t count = rows * size();
    const Memory in(world, path(), count, Dtype::kF32);
    const Memory sums(world, path(), rows, Dtype::kF32);
    const Memory all(world, path(), count, Dtype::kF32);
    const std::int64_t first = rows * world.rank();
    for (int round = 1; round <= 4; ++round) {
      const auto sent = [round](int rank, std::int64_t i) {
        return small_integer(rank + round, i) * round;
      };
      const auto sum = [&](std::int64_t i) {
        double total = 0.0;
        for (int r = 0; r < size(); ++r) total += sent(r, i);
        return total;
      };
      fill(in.view(), [&](std::int64_t i) { return sent(world.rank(), i); });
      world.reduce_scatter({.in = in.view(), .out = sums.view(), .bucket = 1, .planned = true});
      expect_elements(sums.view(), [&](std::int64_t i) { return sum(first + i); });
      world.all_gather(sums.view(), all.view(), Stream::inline_host(), std::nullopt, {2, true});
      expect_elements(all.view(), sum);
      world.all_to_all(in.view(), all.view(), Stream::inline_host(), std::nullopt, {3, true});
      expect_elements(all.view(), [&](std::int64_t i) {
        return sent(static_cast<int>(i / rows), first + i % rows);
      });
      const double divisor = 1 << round;
      world.all_reduce({.data = in.view(), .divisor = divisor, .bucket = 4, .planned = true});
      expect_elements(in.view(), [&](std::int64_t i) { return sum(i) / divisor; });
    }
  });
}

TEST_P(Contract, BroadcastSendsTheRootsBytesFromAnyRoot) {
  run([](Communicator& world) {
    for (int root = 0; root < size(); ++root) {
      for (const std::int64_t count : kCounts) {
        const Memory data(world, path(), count, Dtype::kBf16);
        fill_integers(data.view(), world.rank());
        world.broadcast(data.view(), root);
        expect_elements(data.view(), [&](std::int64_t i) { return small_integer(root, i); });
      }
    }
  });
}

// All ranks share one clock, whether they are threads or processes of this host.
std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

TEST_P(Contract, BarrierHoldsEveryoneUntilTheLastArrives) {
  run([](Communicator& world) {
    for (int round = 1; round <= 50; ++round) {
      const std::int64_t arrived = now_ns();
      world.barrier();
      const std::int64_t left = now_ns();
      const Memory all(world, path(), size(), Dtype::kI64);
      world.all_gather({&arrived, 1, Dtype::kI64}, all.view());
      const auto* const arrivals = static_cast<const std::int64_t*>(all.view().data);
      ASSERT_GE(left, *std::max_element(arrivals, arrivals + size())) << "round " << round;
    }
  });
}

TEST_P(Contract, MessagesLargerThanAnyBuffer) {
  run([](Communicator& world) {
    const std::int64_t count = (std::int64_t{3} << 20) + 5;
    const Memory data(world, path(), count, Dtype::kF32);
    for (std::int64_t i = 0; i < count; i += 1'001) {
      set(data.view(), i, small_integer(world.rank(), i));
    }
    world.all_reduce(data.view());
    for (std::int64_t i = 0; i < count; i += 1'001) {
      double sum = 0.0;
      for (int r = 0; r < size(); ++r) sum += small_integer(r, i);
      ASSERT_EQ(get(data.view(), i), sum);
    }
    ASSERT_EQ(get(data.view(), count - 2), 0.0);
  });
}

TEST_P(Contract, AsynchronousStreamsKeepTheOrder) {
  run([](Communicator& world) {
    Stream stream = Stream::host_worker("comm");
    std::vector<std::unique_ptr<Memory>> all;
    for (int call = 0; call < 8; ++call) {
      all.push_back(std::make_unique<Memory>(world, path(), 3'000 + call, Dtype::kF32));
      fill_integers(all.back()->view(), world.rank());
    }
    for (const auto& data : all) world.all_reduce(data->view(), stream);
    stream.synchronize();
    for (const auto& data : all) expect_integers(data->view(), 0, size());
  });
}

TEST_P(Contract, CountsCallsAndBytes) {
  run([](Communicator& world) {
    const Memory data(world, path(), 100, Dtype::kF32);
    world.all_reduce({.data = data.view(), .wire = Dtype::kBf16});
    world.barrier();
    world.barrier();
    const RowCut cut = row_cuts(100, size()).back();
    const Memory out(world, path(), cut.length(world.rank()) * size(), Dtype::kF32);
    world.all_to_all(data.view(), out.view(), Stream::inline_host(), cut);
    const CollectiveCounts counts = world.stats();
    const std::int64_t ones = size() > 1 ? 1 : 0;
    EXPECT_EQ(counts[CollectiveKind::kAllReduce].calls, ones);
    EXPECT_EQ(counts[CollectiveKind::kAllReduce].bytes, 200 * ones);
    EXPECT_EQ(counts[CollectiveKind::kBarrier].calls, 2 * ones);
    EXPECT_EQ(counts[CollectiveKind::kAllToAll].calls, ones);
    EXPECT_EQ(counts[CollectiveKind::kAllToAll].bytes, 400 * ones);
    EXPECT_EQ(counts[CollectiveKind::kReduceScatter].calls, 0);
  });
}

}  // namespace
}  // namespace hsdp::test
