// The contract on the MPI engine, and what MPI adds: pieces, threads, steps of a Reducer.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/comm/contract_suite.h"
#include "tests/comm/elements.h"
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

// Longer than a piece, for every collective that sends a row as one message.
TEST(MpiEngine, LongMessagesTravelInPieces) {
  run_in_group("mpi", [](Communicator& group) {
    const std::int64_t row = (std::int64_t{9} << 20) + 3;
    const int size = group.size();
    std::vector<std::uint8_t> mine(static_cast<std::size_t>(row * size));
    const auto sent_by = [](int rank, std::int64_t i) {
      return static_cast<std::uint8_t>(i * 31 + (i >> 20) + rank * 7);
    };
    for (std::int64_t i = 0; i < row * size; ++i) {
      mine[static_cast<std::size_t>(i)] = sent_by(group.rank(), i);
    }
    std::vector<std::uint8_t> all(mine.size());
    const TensorView in{mine.data(), row * size, Dtype::kU8};
    const TensorView out{all.data(), row * size, Dtype::kU8};
    const auto expect = [&](const std::vector<std::uint8_t>& got, const auto& rank_and_place) {
      for (std::int64_t i = 0; i < row * size; i += 997) {
        const auto [rank, place] = rank_and_place(i / row, i % row);
        ASSERT_EQ(got[static_cast<std::size_t>(i)], sent_by(static_cast<int>(rank), place)) << i;
      }
    };
    group.all_to_all(in, out);
    expect(all, [&](auto r, auto i) { return std::pair(r, group.rank() * row + i); });
    group.all_gather(in.slice(0, row), out);
    expect(all, [](auto r, auto i) { return std::pair(r, i); });
    group.broadcast(in, size - 1);
    expect(mine, [&](auto r, auto i) { return std::pair(size - 1, r * row + i); });
  });
}

// As the shard hop of one bucket and the replica hop of another do.
TEST(MpiEngine, TwoGroupsMoveFromTwoThreads) {
  run_in_group("mpi", [](Communicator& world) {
    std::vector<Communicator> groups{world.split(0, world.rank()), world.split(0, -world.rank())};
    run_each(groups.size(), [&](std::size_t g) {
      std::vector<float> memory(40'000);
      const TensorView data{memory.data(), std::ssize(memory)};
      const int n = world.size();
      const int factor = g == 0 ? 1 : 2;
      for (int round = 0; round < 60; ++round) {
        fill(data, [&](std::int64_t i) { return (world.rank() + 1) * factor + (i + round) % 64; });
        groups[g].all_reduce(data);
        expect_elements(data, [&](std::int64_t i) {
          return n * (n + 1) / 2 * factor + n * ((i + round) % 64);
        });
      }
    });
  });
}

TEST(MpiEngine, AReducerGivesTheBitsOfTheReference) {
  const int size = launched_size();
  std::vector<MeshShape> shapes{{.replicate = 1, .shard = size}, {.replicate = size, .shard = 1}};
  if (size == 4) shapes = {kSquare};
  for (const MeshShape shape : shapes) {
    for (const Dtype dtype : kDtypes) {
      SCOPED_TRACE(to_string(shape) + " " + std::string(name(dtype)));
      const StepCase step = random_step(odd_parameters(dtype), size,
                                        {Sync::kNone, Sync::kShard, Sync::kShard, Sync::kAll}, 7);
      const ReducerOptions options{.replica_dtype = Dtype::kBf16, .bucket_bytes = 4'096};
      run_in_group("mpi", [&](Communicator& job) {
        const Mesh mesh(job, {.replicate = shape.replicate, .shard = shape.shard, .engine = "mpi"});
        Reducer reducer(mesh, options);
        register_all(reducer, step);
        run_step(reducer, step, mesh.rank());
        const std::vector<Values> got = gathered(reducer, step);
        for (std::size_t p = 0; p < got.size(); ++p) {
          const ReferenceStep reference = reference_step(step, options, shape, p);
          expect_same_bits(got[p], reference_result(reference, step.gradients[p]),
                           step.parameters[p].name);
        }
      });
    }
  }
}

}  // namespace
}  // namespace hsdp::test
