// Memory that NCCL knows: on every rank or on none, on both sides of a transfer or on neither.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/device/buffer.h"
#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "nccl_ranks.h"
#include "tests/comm/elements.h"
#include "tests/support/temporary_directory.h"

namespace hsdp::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kRanks = 3;

// f32 of the group's memory or of the device's, filled with `first`, `first` + 1, ...
class Values {
 public:
  Values(Communicator& world, bool registered, std::int64_t count, double first = 0) {
    if (registered) {
      shared_ = world.allocate(count, Dtype::kF32);
      view_ = shared_.view();
    } else {
      buffer_ = Buffer(gpu_of(world.rank()), static_cast<std::size_t>(count) * sizeof(float));
      view_ = buffer_.view(Dtype::kF32);
    }
    for (std::int64_t i = 0; i < count; ++i) set(view_, i, first + static_cast<double>(i));
  }
  [[nodiscard]] const TensorView& view() const { return view_; }
  [[nodiscard]] double operator[](std::int64_t i) const { return get(view_, i); }

 private:
  SharedMemory shared_;
  Buffer buffer_;
  TensorView view_;
};

// The contract covers memory of the same kind on both sides.
class NcclMemoryKinds : public ::testing::TestWithParam<bool> {};

TEST_P(NcclMemoryKinds, MoveInEveryCollective) {
  const bool in_registered = GetParam();
  const bool out_registered = !in_registered;
  const std::int64_t before = nccl_stand_in().allocated();
  run_nccl_ranks(kRanks, [&](Communicator& world) {
    const int rank = world.rank();
    const RowCut uneven({0, 5, 5, 12});
    const Values in(world, in_registered, 12, 100.0 * rank);
    const Values row(world, out_registered, uneven.length(rank));
    world.reduce_scatter({.in = in.view(), .out = row.view(), .cut = uneven});
    for (std::int64_t i = 0; i < row.view().count; ++i) {
      ASSERT_EQ(row[i], 300.0 + 3.0 * static_cast<double>(uneven.begin(rank) + i));
    }
    for (const RowCut& cut : {RowCut(12, kRanks), uneven}) {
      const std::int64_t own = cut.length(rank);
      const Values mine(world, in_registered, own, static_cast<double>(cut.begin(rank)));
      const Values all(world, out_registered, 12);
      world.all_gather(mine.view(), all.view(), Stream::inline_host(), cut);
      for (std::int64_t i = 0; i < 12; ++i) ASSERT_EQ(all[i], i) << own;
      const Values from_all(world, out_registered, own * kRanks);
      world.all_to_all(in.view(), from_all.view(), Stream::inline_host(), cut);
      for (std::int64_t i = 0; i < own * kRanks; ++i) {
        ASSERT_EQ(from_all[i], 100.0 * static_cast<double>(i / own) +
                                   static_cast<double>(cut.begin(rank) + i % own));
      }
    }
    for (const Dtype wire : {Dtype::kF32, Dtype::kBf16}) {
      const Values data(world, in_registered, 100, rank);
      world.all_reduce({.data = data.view(), .wire = wire});
      for (std::int64_t i = 0; i < 80; ++i) ASSERT_EQ(data[i], 3.0 * static_cast<double>(i + 1));
    }
    const Values told(world, out_registered, 7, rank);
    world.broadcast(told.view(), 2);
    ASSERT_EQ(told[0], 2.0);
    world.barrier();
  });
  EXPECT_EQ(nccl_stand_in().enrolled(), 0);
  EXPECT_EQ(nccl_stand_in().allocated(), before);
}

INSTANTIATE_TEST_SUITE_P(Kinds, NcclMemoryKinds, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "registered_to_plain" : "plain_to_registered");
});

TEST(NcclMemory, OfTwoKindsInOneCallIsAMismatch) {
  run_nccl_ranks(2, [](Communicator& world) {
    const Values allocated(world, true, 64);
    const Values plain(world, false, 64);
    const Values out(world, false, 32);
    const auto mixed = [&] {
      const Values& in = world.rank() == 0 ? allocated : plain;
      world.reduce_scatter(in.view(), out.view());
    };
    EXPECT_THAT(mixed, ThrowsMessage<MismatchError>(
                           AllOf(HasSubstr("reduce_scatter"), HasSubstr("allocate() on every rank"),
                                 HasSubstr("rank 0"), HasSubstr("rank 1"))));
  });
}

TEST(NcclMemory, ThatOneRankCannotRegisterIsRegisteredNowhere) {
  run_nccl_ranks(kRanks, [](Communicator& world) {
    const Values before(world, true, 12, world.rank());
    if (world.rank() == 1) refuse_registration(1);
    static_cast<void>(world.exchange("", "refuse"));
    const Values row(world, false, 4);
    world.reduce_scatter(before.view(), row.view());  // needs work memory of the same kind
    EXPECT_EQ(row[0], 3.0 + 3.0 * 4 * world.rank());
    static_cast<void>(world.exchange("", "look"));
    EXPECT_EQ(nccl_stand_in().enrolled(), 0);
    const Values after(world, true, 12, world.rank());
    world.reduce_scatter(after.view(), row.view());
    EXPECT_EQ(row[1], 6.0 + 3.0 * 4 * world.rank());
    static_cast<void>(world.exchange("", "look"));
    EXPECT_EQ(nccl_stand_in().enrolled(), 0);
  });
}

TEST(NcclMemory, ThatRunsOutOnOneRankIsAnErrorOfAllAndTheyGoOn) {
  run_nccl_ranks(kRanks, [](Communicator& world) {
    const Values in(world, true, 12, world.rank());
    static_cast<void>(world.exchange("", "begin"));
    if (world.rank() == 2) stand_in::fail_allocation({{.device = 2}});
    static_cast<void>(world.exchange("", "fail"));
    const std::array<ReduceScatter, 1> calls{{{.in = in.view()}}};
    EXPECT_THROW(world.reserve(calls), Error);
    world.reserve(calls);
    const Values row(world, false, 4);
    world.reduce_scatter(in.view(), row.view());
    EXPECT_EQ(row[0], 3.0 + 3.0 * 4 * world.rank());
  });
}

// Memory that was not reserved is allocated before any rank begins.
TEST(NcclMemory, ThatACallFindsMissingIsAnErrorOfAllAndTheyGoOn) {
  run_nccl_ranks(kRanks, [](Communicator& world) {
    Stream stream = Stream::create(gpu_of(world.rank()), "caller");
    const Values data(world, false, 12, world.rank());
    static_cast<void>(world.exchange("", "begin"));
    if (world.rank() == 2) stand_in::fail_allocation({{.device = 2}});
    static_cast<void>(world.exchange("", "fail"));
    EXPECT_THAT(
        [&] { world.all_reduce({.data = data.view(), .bucket = 5}, stream); },
        ThrowsMessage<Error>(
            AllOf(HasSubstr(world.rank() == 2 ? "cannot allocate 512 bytes"
                                              : "all_reduce of bucket 5: no memory for 512 bytes"),
                  HasSubstr("(rank 2 of 3)"))));
    world.all_reduce({.data = data.view()}, stream);
    stream.synchronize();
    EXPECT_EQ(data[0], 3.0);
  });
}

// Whole slices, which no rank has when results are cut over the replicas.
TEST(NcclMemory, ThatASnapshotFindsMissingOnOneRankIsAnErrorOfAllAndTheyGoOn) {
  const TemporaryDirectory folder;
  const StepCase step = random_step({{.name = "w", .shape = {4096}}}, 2, {Sync::kAll}, 0);
  run_nccl_mesh({2, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.shard_over = ShardOver::kMesh});
    GpuRank rank(reducer, step, mesh);
    rank.run();
    static_cast<void>(mesh.world().exchange("", "begin"));
    if (mesh.rank() == 1) stand_in::fail_allocation({{.device = 1}});
    static_cast<void>(mesh.world().exchange("", "fail"));
    const auto save = [&] { reducer.save_snapshot(folder.path(), 1); };
    const char* const text = mesh.rank() == 1 ? "cannot allocate 16384 bytes"
                                              : "rank 1 of 2 could not allocate whole slices";
    EXPECT_THAT(save, ThrowsMessage<Error>(HasSubstr(text)));
    save();
    reducer.flush_snapshots();
  });
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
}

TEST(NcclMemory, ThatWasReservedIsAllThatCallsNeed) {
  for (const bool registered : {false, true}) {
    run_nccl_ranks(kRanks, [registered](Communicator& world) {
      const Values in(world, registered, 600, world.rank());
      const Values row(world, false, 200);
      const std::array<ReduceScatter, 1> scatters{{{.in = in.view()}}};
      const std::array<AllReduce, 1> reduces{{{.data = row.view(), .wire = Dtype::kBf16}}};
      world.reserve(scatters);
      Communicator other = world.split(0, world.rank());
      other.reserve(reduces);
      Stream stream = Stream::create(gpu_of(world.rank()), "caller");
      static_cast<void>(world.exchange("", "begin"));
      const std::int64_t before = stand_in::allocation_count();
      static_cast<void>(world.exchange("", "counted"));
      for (int i = 0; i < 3; ++i) {
        world.reduce_scatter({.in = in.view(), .out = row.view()}, stream);
        other.all_reduce({.data = row.view(), .wire = Dtype::kBf16}, stream);
      }
      stream.synchronize();
      static_cast<void>(world.exchange("", "ended"));
      EXPECT_EQ(stand_in::allocation_count(), before);
    });
  }
}

// A bucket is sent from registered staging to registered work memory.
TEST(NcclMemory, OfAReducersShardHopIsRegisteredOnBothSides) {
  const StepCase step = random_step(parameters(Dtype::kBf16), 4, {Sync::kShard, Sync::kAll}, 61);
  const auto results = nccl_results(kSquare, [&](const Mesh& mesh) {
    Communicator world = mesh.world();
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    RankResult result = GpuRank(reducer, step, mesh).run_step();
    static_cast<void>(world.exchange("", "step"));
    constexpr int kOfARank = 3;  // two slots and the received rows
    EXPECT_GE(nccl_stand_in().enrolled(), kOfARank * world.size());
    static_cast<void>(world.exchange("", "looked"));
    return result;
  });
  expect_reference(results, step, {}, kSquare, "registered");
}

}  // namespace
}  // namespace hsdp::test
