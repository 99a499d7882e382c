// What the NCCL engine calls in libnccl, and what it does beyond the contract of all engines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/device/buffer.h"
#include "hsdp/error.h"
#include "nccl_ranks.h"
#include "tests/comm/elements.h"
#include "tests/stand_in/nccl/nccl.h"

namespace hsdp::test {
namespace {

using stand_in::NcclCall;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

// The names and sizes of a rank's calls, one string for each group.
std::vector<std::string> groups_of(int rank) {
  std::vector<std::string> groups;
  int last = -1;
  for (const NcclCall& call : nccl_stand_in().calls(rank)) {
    if (call.group != last) groups.emplace_back();
    last = call.group;
    std::string& group = groups.back();
    group += (group.empty() ? "" : " ") + call.name + ":" + std::to_string(call.bytes);
  }
  return groups;
}

TEST(NcclEngine, AnExactReduceScatterIsOneGroupOfUnevenRows) {
  run_nccl_ranks(3, [](Communicator& world) {
    const Device gpu = gpu_of(world.rank());
    const RowCut cut(std::vector<std::int64_t>{0, 0, 5, 12});
    const Buffer in(gpu, 48);
    const Buffer out(gpu, 64);
    world.reduce_scatter({.in = in.view(Dtype::kF32),
                          .out = out.view(Dtype::kF32).slice(0, cut.length(world.rank())),
                          .cut = cut});
  });
  EXPECT_THAT(groups_of(0), ElementsAre("send:20 send:28"));
  EXPECT_THAT(groups_of(1), ElementsAre("send:28 recv:20 recv:20"));
  EXPECT_THAT(groups_of(2), ElementsAre("send:20 recv:28 recv:28"));
}

TEST(NcclEngine, AnExactAllReduceSendsTheWireDtypeTwice) {
  run_nccl_ranks(2, [](Communicator& world) {
    const Buffer data(gpu_of(world.rank()), 4 * 128);
    world.all_reduce({.data = data.view(Dtype::kF32), .wire = Dtype::kBf16});
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(groups_of(rank), ElementsAre("send:128 recv:128", "all_gather:128"));
  }
}

TEST(NcclEngine, NativeSumsAreNcclsInFp32) {
  run_nccl_ranks(2, [](Communicator& world) {
    const Device gpu = gpu_of(world.rank());
    const Buffer data(gpu, 4 * 128);
    const Buffer out(gpu, 4 * 128);
    world.all_reduce(
        {.data = data.view(Dtype::kF32), .wire = Dtype::kBf16, .reduction = Reduction::kNative});
    world.reduce_scatter({.in = data.view(Dtype::kBf16),
                          .out = out.view(Dtype::kF32),
                          .reduction = Reduction::kNative});
    // Sums of these are always exact.
    world.all_reduce({.data = data.view(Dtype::kI64), .reduction = Reduction::kNative});
    const CollectiveCounts counts = world.stats();
    EXPECT_EQ(counts[CollectiveKind::kAllReduce].bytes, 512 + 512);
    EXPECT_EQ(counts[CollectiveKind::kReduceScatter].bytes, 1024);
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(groups_of(rank), ElementsAre("all_reduce:512", "reduce_scatter:512",
                                             "send:256 recv:256", "all_gather:256"));
  }
}

// Uneven rows are sent as rows of the longest length; the padding must not reach the output.
TEST(NcclEngine, NativeReduceScatterTakesAnyCut) {
  run_nccl_ranks(3, [](Communicator& world) {
    const Device gpu = gpu_of(world.rank());
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const RowCut& cut : {RowCut(12, 3), RowCut(13, 3), RowCut({0, 0, 9, 13})}) {
        const Buffer in(gpu, 64);
        const Buffer out(gpu, 64);
        const TensorView row = out.view(Dtype::kF32).slice(0, cut.length(world.rank()));
        const TensorView all = in.view(dtype).slice(0, cut.count());
        for (std::int64_t i = 0; i < all.count; ++i) set(all, i, small_integer(world.rank(), i));
        for (std::int64_t i = 0; i < row.count; ++i) set(row, i, 100.0);
        world.reduce_scatter({.in = all,
                              .out = row,
                              .cut = cut,
                              .accumulate = true,
                              .sum_exponent = 1,
                              .divisor = 4.0F,
                              .reduction = Reduction::kNative});
        for (std::int64_t i = 0; i < row.count; ++i) {
          const std::int64_t at = cut.begin(world.rank()) + i;
          double sum = 0;
          for (int r = 0; r < 3; ++r) sum += small_integer(r, at);
          ASSERT_EQ(get(row, i), (100.0 + 2 * sum) / 4.0) << name(dtype) << " element " << i;
        }
      }
    }
  });
}

TEST(NcclEngine, ACallOnAStreamOfTheGpuDoesNotWaitForIt) {
  run_nccl_ranks(2, [](Communicator& world) {
    const Device gpu = gpu_of(world.rank());
    const Buffer data(gpu, 400);
    Stream stream = Stream::create(gpu, "caller");
    static_cast<void>(world.exchange("", "ready"));
    Event done;
    {
      const stand_in::Standstill nothing_moves;
      world.all_reduce(data.view(Dtype::kF32), stream);
      world.all_gather(data.view(Dtype::kF32).slice(world.rank() * 50, 50), data.view(Dtype::kF32),
                       stream);
      world.barrier(stream);
      done = stream.record();
      EXPECT_FALSE(done.complete());
    }
    world.wait(done);
  });
}

TEST(NcclEngine, AGroupOfOneAsksNcclForNothing) {
  nccl_stand_in().reset();
  run_ranks(1, [](Communicator& host) {
    Communicator world = comm::nccl_world(control_of(host), gpu_of(0));
    EXPECT_EQ(world.transport(), Transport::kNone);
    const Buffer in(gpu_of(0), 64);
    const Buffer out(gpu_of(0), 64);
    world.reduce_scatter(in.view(Dtype::kF32), out.view(Dtype::kF32));
    world.all_reduce({.data = out.view(Dtype::kF32), .wire = Dtype::kBf16});
    world.all_gather(in.view(Dtype::kU8), out.view(Dtype::kU8));
    world.all_to_all(out.view(Dtype::kU8), in.view(Dtype::kU8));
    world.broadcast(in.view(Dtype::kU8));
    world.barrier();
    Communicator part = world.split(3, 0);
    EXPECT_EQ(part.size(), 1);
    EXPECT_EQ(part.allocate(10, Dtype::kF32).view().count, 10);
  });
  EXPECT_EQ(nccl_stand_in().communicators(), 0);
  EXPECT_EQ(nccl_stand_in().allocated(), 0);
  EXPECT_THAT(nccl_stand_in().calls(0), IsEmpty());
}

TEST(NcclEngine, AllocatedMemoryIsZeroRegisteredAndGivenBack) {
  run_nccl_ranks(2, [](Communicator& world) {
    const SharedMemory first = world.allocate(1000, Dtype::kF32);
    {
      const SharedMemory second = world.allocate(world.rank() * 10, Dtype::kBf16);
      EXPECT_EQ(second.view().count, world.rank() * 10);
    }
    EXPECT_EQ(first.view().device, gpu_of(world.rank()));
    for (std::int64_t i = 0; i < 1000; ++i) ASSERT_EQ(get(first.view(), i), 0.0);
    static_cast<void>(world.exchange("", "both"));
    EXPECT_GE(nccl_stand_in().enrolled(), 1);
  });
  EXPECT_EQ(nccl_stand_in().enrolled(), 0);
  EXPECT_EQ(nccl_stand_in().allocated(), 0);
}

TEST(NcclEngine, SplitsByColorAndKey) {
  run_nccl_ranks(4, [](Communicator& world) {
    Communicator part = world.split(world.rank() % 2, -world.rank());
    ASSERT_EQ(part.size(), 2);
    EXPECT_EQ(part.rank(), world.rank() < 2 ? 1 : 0);
    const std::vector<int> members{world.rank() % 2 + 2, world.rank() % 2};
    EXPECT_EQ(part.world_ranks(), members);
    EXPECT_EQ(part.transport(), Transport::kNccl);
    const Buffer data(gpu_of(world.rank()), 16);
    set(data.view(Dtype::kF32), 0, part.rank() == 0 ? 5.0 : 1.0);
    part.broadcast(data.view(Dtype::kF32));
    EXPECT_EQ(get(data.view(Dtype::kF32), 0), 5.0);
    Communicator few = world.split(world.rank() == 3 ? -1 : 0, 0);
    EXPECT_EQ(few.size(), world.rank() == 3 ? 0 : 3);
    if (few) few.barrier();
  });
  EXPECT_TRUE(soon([] { return nccl_stand_in().communicators() == 0; }));
  EXPECT_EQ(nccl_stand_in().aborts(), 0) << "a group that nothing is wrong with is not aborted";
}

TEST(NcclEngine, NeedsAGpu) {
  run_ranks(1, [](Communicator& host) {
    EXPECT_THAT([&] { static_cast<void>(comm::nccl_world(control_of(host), Device{})); },
                ThrowsMessage<UsageError>(HasSubstr("expected a CUDA device, got cpu")));
  });
}

}  // namespace
}  // namespace hsdp::test
