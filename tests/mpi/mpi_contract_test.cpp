// The contract on the MPI engine, and what MPI adds to it: pieces, threads, the host engine's bits.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/comm/contract_suite.h"
#include "tests/mpi/mpi_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {
namespace {

ContractCase mpi_case(Path path) {
  return {.name = name(path) + "_" + std::to_string(launched_size()),
          .size = launched_size(),
          .path = path,
          .run = [](const auto& body) { run_in_group("mpi", body); }};
}

INSTANTIATE_TEST_SUITE_P(Mpi, Contract,
                         testing::Values(mpi_case(Path::kDirect), mpi_case(Path::kPrivate)),
                         [](const auto& chosen) { return chosen.param.name; });

TEST(MpiEngine, SaysWhatItIs) {
  run_in_group("mpi", [](Communicator& group) {
    EXPECT_EQ(group.engine_name(), "mpi");
    EXPECT_EQ(group.transport(), Transport::kMpi);
    EXPECT_EQ(group.size(), launched_size());
    Communicator alone = group.split(group.rank(), 0);
    EXPECT_EQ(alone.size(), 1);
    EXPECT_EQ(alone.transport(), Transport::kNone);
    float value = 3.0F;
    alone.all_reduce(TensorView{&value, 1});
    EXPECT_EQ(value, 3.0F);
    EXPECT_FALSE(group.split(-1, 0));
  });
}

// Longer than a piece, in every collective that sends a row as one message.
TEST(MpiEngine, LongMessagesTravelInPieces) {
  run_in_group("mpi", [](Communicator& group) {
    const std::int64_t row = (std::int64_t{9} << 20) + 3;
    const int size = group.size();
    std::vector<std::uint8_t> mine(static_cast<std::size_t>(row * size));
    for (std::int64_t i = 0; i < row * size; ++i) {
      mine[static_cast<std::size_t>(i)] =
          static_cast<std::uint8_t>(i * 31 + (i >> 20) + group.rank() * 7);
    }
    const auto sent_by = [&](int rank, std::int64_t i) {
      return static_cast<std::uint8_t>(i * 31 + (i >> 20) + rank * 7);
    };
    std::vector<std::uint8_t> all(mine.size());
    const TensorView in{mine.data(), row * size, Dtype::kU8};
    const TensorView out{all.data(), row * size, Dtype::kU8};
    group.all_to_all(in, out);
    for (std::int64_t i = 0; i < row * size; i += 997) {
      const auto r = static_cast<int>(i / row);
      ASSERT_EQ(all[static_cast<std::size_t>(i)], sent_by(r, group.rank() * row + i % row)) << i;
    }
    group.all_gather(in.slice(0, row), out);
    for (std::int64_t i = 0; i < row * size; i += 997) {
      ASSERT_EQ(all[static_cast<std::size_t>(i)], sent_by(static_cast<int>(i / row), i % row)) << i;
    }
    group.broadcast(in, size - 1);
    for (std::int64_t i = 0; i < row * size; i += 997) {
      ASSERT_EQ(mine[static_cast<std::size_t>(i)], sent_by(size - 1, i)) << i;
    }
  });
}

// As the shard hop of a bucket and the replica hop of another do.
TEST(MpiEngine, TwoGroupsMoveFromTwoThreads) {
  run_in_group("mpi", [](Communicator& world) {
    std::vector<Communicator> groups{world.split(0, world.rank()), world.split(0, -world.rank())};
    constexpr int kRounds = 60;
    constexpr std::int64_t kCount = 40'000;
    std::vector<std::atomic<int>> wrong(groups.size());
    run_each(groups.size(), [&](std::size_t g) {
      std::vector<float> data(kCount);
      for (int round = 0; round < kRounds; ++round) {
        for (std::int64_t i = 0; i < kCount; ++i) {
          data[static_cast<std::size_t>(i)] =
              static_cast<float>(world.rank() + 1) * static_cast<float>(g + 1) +
              static_cast<float>((i + round) % 64);
        }
        groups[g].all_reduce(TensorView{data.data(), kCount});
        const int n = world.size();
        for (std::int64_t i = 0; i < kCount; i += 101) {
          const auto expected = static_cast<float>(n * (n + 1) / 2) * static_cast<float>(g + 1) +
                                static_cast<float>(n) * static_cast<float>((i + round) % 64);
          if (data[static_cast<std::size_t>(i)] != expected) ++wrong[g];
        }
      }
    });
    for (const auto& count : wrong) EXPECT_EQ(count.load(), 0);
  });
}

RankResult reduce_over(const std::string& engine, MeshShape shape, const StepCase& step,
                       const ReducerOptions& options) {
  RankResult result;
  run_in_group(engine, [&](Communicator& job) {
    const Mesh mesh(job, {.replicate = shape.replicate, .shard = shape.shard, .engine = engine});
    Reducer reducer(mesh, options);
    register_all(reducer, step);
    result = run_step(reducer, step, mesh.rank());
  });
  return result;
}

TEST(MpiEngine, AReducerGivesTheBitsOfTheHostEngine) {
  const int size = launched_size();
  std::vector<MeshShape> shapes{{.replicate = 1, .shard = size}, {.replicate = size, .shard = 1}};
  if (size == 4) shapes = {{.replicate = 2, .shard = 2}};
  for (const MeshShape shape : shapes) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      const StepCase step = random_step(odd_parameters(dtype), size,
                                        {Sync::kNone, Sync::kShard, Sync::kShard, Sync::kAll}, 7);
      const ReducerOptions options{.replica_dtype = Dtype::kBf16, .bucket_bytes = 4'096};
      const RankResult mpi = reduce_over("mpi", shape, step, options);
      const RankResult host = reduce_over("host", shape, step, options);
      ASSERT_EQ(mpi.shards.size(), host.shards.size());
      for (std::size_t p = 0; p < mpi.shards.size(); ++p) {
        expect_same_bits(mpi.shards[p], host.shards[p],
                         to_string(shape) + " " + std::string(name(dtype)));
      }
    }
  }
}

}  // namespace
}  // namespace hsdp::test
