// A failure in NCCL, on a GPU or at a peer ends the world on every rank, in time, with an error
// that says why; the process continues.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"
#include "cuda_stand_in.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/flag.h"
#include "hsdp/error.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "hsdp/row_reducer.h"
#include "nccl_ranks.h"
#include "quant/loco_hop.h"
#include "tests/comm/stage_control.h"
#include "tests/stand_in/nccl/nccl.h"
#include "zero/parameter_gather.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr ThreadRanksOptions kUnhurried{.timeout = milliseconds(20'000)};
constexpr ThreadRanksOptions kImpatient{.timeout = milliseconds(400)};

// The error that the call throws: "TimeoutError: ...".
std::string outcome_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const TimeoutError& e) {
    return std::string("TimeoutError: ") + e.what();
  } catch (const PeerLostError& e) {
    return std::string("PeerLostError: ") + e.what();
  } catch (const MismatchError& e) {
    return std::string("MismatchError: ") + e.what();
  } catch (const RankError& e) {
    return std::string("RankError: ") + e.what();
  } catch (const UsageError& e) {
    return std::string("UsageError: ") + e.what();
  } catch (const std::exception& e) {
    return std::string("another: ") + e.what();
  }
  return "nothing";
}

std::vector<std::string> outcomes(int size, const RankBody& body,
                                  const ThreadRanksOptions& options = kUnhurried) {
  std::vector<std::string> texts;
  for (const auto& error : try_nccl_ranks(size, body, options)) {
    texts.push_back(outcome_of([&] {
      if (error) std::rethrow_exception(error);
    }));
  }
  return texts;
}

// Data on a rank's GPU and the stream that uses it. A collective that throws may have enqueued some
// of its work.
struct OnGpu {
  explicit OnGpu(Device gpu) : data(gpu, 4096), stream(Stream::create(gpu, "caller")) {}
  ~OnGpu() {
    try {
      stream.synchronize();
    } catch (const Error&) {  // the test has caught the error that broke the stream
    }
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  void all_reduce(Communicator& world, int bucket) {
    world.all_reduce({.data = data.view(Dtype::kF32), .bucket = bucket}, stream);
  }

  Buffer data;
  Stream stream;
};

void reduce_and_wait(Communicator& world, int bucket) {
  OnGpu gpu(gpu_of(world.rank()));
  gpu.all_reduce(world, bucket);
  world.wait(gpu.stream.record());
}

// In the background, once the rank has made another call of NCCL.
void after_next_call(int rank, const std::function<void()>& act) {
  std::thread([=, before = nccl_stand_in().calls(rank).size()] {
    EXPECT_TRUE(soon([&] { return nccl_stand_in().calls(rank).size() > before; }));
    act();
  }).detach();
}

// How connecting with those GPUs ends on each rank.
std::vector<std::string> connect(int size, const std::function<Device(int rank)>& gpu) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  const auto attempt = [&](Communicator& host) {
    texts[static_cast<std::size_t>(host.rank())] = outcome_of(
        [&] { static_cast<void>(comm::nccl_world(control_of(host), gpu(host.rank()))); });
  };
  run_ranks(size, attempt, kUnhurried);
  return texts;
}

// The rank's sum is enqueued and waits when the next call fails.
TEST(NcclFailure, ACallThatThrowsUsesItsMemoryNoMore) {
  const auto texts = outcomes(2, [](Communicator& world) {
    const SharedMemory memory = world.allocate(64, Dtype::kF32);
    auto* const data = static_cast<float*>(memory.view().data);
    world.all_reduce(memory.view());
    if (world.rank() == 1) return world.all_reduce(memory.view());
    auto nothing_moves = std::make_unique<stand_in::Standstill>();
    std::thread later([&] {
      std::this_thread::sleep_for(milliseconds(200));
      nothing_moves.reset();
    });
    stand_in::fail_call(
        {{.name = "cudaLaunchKernel", .error = cudaErrorInvalidValue, .after = 1, .device = 0}});
    const std::string text = outcome_of([&] { world.all_reduce(memory.view()); });
    stand_in::fail_call(std::nullopt);
    std::fill_n(data, 64, -1.0F);
    later.join();
    std::this_thread::sleep_for(milliseconds(20));
    EXPECT_EQ(std::count(data, data + 64, -1.0F), 64);
    EXPECT_THAT(text, HasSubstr("cannot start a kernel"));
  });
  EXPECT_EQ(texts[0], "nothing");  // rank 1 may have everything it needs
}

TEST(NcclFailure, DifferentCallsAreNamedBeforeDataMoves) {
  struct Row {
    std::function<void(Communicator&, const Buffer& data, bool other)> call;
    std::string of_most;
    std::string of_rank_1;
  };
  const std::vector<Row> rows{
      {[](Communicator& world, const Buffer& data, bool other) {
         const TensorView part = data.view(Dtype::kF32).slice(0, other ? 99 : 100);
         world.all_reduce({.data = part, .bucket = 3});
       },
       "all_reduce of 100 f32 of bucket 3 (ranks 0, 2)", "of 99 f32 of bucket 3 (rank 1)"},
      {[](Communicator& world, const Buffer& data, bool other) {
         const RowCut cut({0, other ? 30 : 40, 60, 100});
         const TensorView bytes = data.view(Dtype::kU8);
         world.all_to_all(bytes.slice(0, 100), bytes.slice(100, 3 * cut.length(world.rank())),
                          Stream::inline_host(), cut, {5});
       },
       "all_to_all of 100 u8 of bucket 5 (ranks 0, 2)", "with another cut, exponent or divisor"},
      {[](Communicator& world, const Buffer& data, bool other) {
         world.all_reduce({.data = data.view(Dtype::kF32),
                           .reduction = other ? Reduction::kNative : Reduction::kExact});
       },
       "all_reduce of 1024 f32 (ranks 0, 2)", "with another cut, exponent or divisor"}};
  for (const Row& row : rows) {
    const auto texts = outcomes(3, [&](Communicator& world) {
      const Buffer data(gpu_of(world.rank()), 4096);
      const std::string first = outcome_of([&] { row.call(world, data, world.rank() == 1); });
      EXPECT_EQ(outcome_of([&] { world.barrier(); }), first);
      EXPECT_TRUE(nccl_stand_in().calls(world.rank()).empty());
      world.barrier();
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("MismatchError: nccl: the ranks' calls do not match"),
                                  HasSubstr(row.of_most), HasSubstr(row.of_rank_1))));
  }
}

TEST(NcclFailure, APeerThatDoesNotCallIsNamed) {
  const auto texts = outcomes(
      3,
      [](Communicator& world) {
        if (world.rank() != 1) return reduce_and_wait(world, 5);
        EXPECT_TRUE(soon([&] { return control_of(world)->failed(); }));
        world.barrier();
      },
      kImpatient);
  EXPECT_THAT(texts, Each(HasSubstr("rank 1 of 3 did not arrive")));
  for (const std::size_t waiting : {0, 2}) {
    EXPECT_THAT(texts[waiting], HasSubstr("TimeoutError: all_reduce of bucket 5"));
  }
  // Aborted in the background: the next test counts its own calls.
  EXPECT_TRUE(soon([] { return nccl_stand_in().communicators() == 0; }));
}

TEST(NcclFailure, AGpuThatHangsIsATimeoutAndEverythingIsAborted) {
  const auto start = Clock::now();
  const auto texts = outcomes(
      3,
      [](Communicator& world) {
        nccl_stand_in().hang(1);
        const std::string first = outcome_of([&] { reduce_and_wait(world, 7); });
        EXPECT_EQ(outcome_of([&] { world.barrier(); }), first);
        EXPECT_EQ(outcome_of([&] { static_cast<void>(world.split(0, 0)); }), first);
        world.barrier();
      },
      kImpatient);
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("TimeoutError"), HasSubstr("all_reduce of bucket 7"))));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  EXPECT_TRUE(soon([] { return nccl_stand_in().communicators() == 0; }));
  EXPECT_EQ(nccl_stand_in().aborts(), 3);
  EXPECT_EQ(nccl_stand_in().revokes(), 3);
}

TEST(NcclFailure, AnAbortThatHangsHoldsNobodyUp) {
  const auto start = Clock::now();
  std::vector<Buffer> memory(2);  // the GPU still uses it after its ranks have given up
  const auto texts = outcomes(
      2,
      [&memory](Communicator& world) {
        nccl_stand_in().hang(0);
        nccl_stand_in().hang_aborts();
        const Device gpu = gpu_of(world.rank());
        Buffer& data = memory[static_cast<std::size_t>(world.rank())] = Buffer(gpu, 4096);
        Stream stream = Stream::create(gpu, "caller");
        world.all_reduce({.data = data.view(Dtype::kF32), .bucket = 1}, stream);
        world.wait(stream.record());
      },
      kImpatient);
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("TimeoutError"), HasSubstr("bucket 1"))));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  EXPECT_GT(nccl_stand_in().communicators(), 0);
  nccl_stand_in().release();
  EXPECT_TRUE(soon([] { return nccl_stand_in().communicators() == 0; }));
  for (int rank = 0; rank < 2; ++rank) Stream::borrow(gpu_of(rank), nullptr).synchronize();
}

// Neither closing a Reducer nor the end of its last step waits long for the GPU.
TEST(NcclFailure, AnAbortThatHangsHoldsNoReducerUp) {
  std::latch closed(2);
  std::latch released(1);
  const auto texts = outcomes(
      2,
      [&](Communicator& world) {
        const Mesh mesh = mesh_of(world, {2, 1});
        std::optional<Reducer> reducer;
        reducer.emplace(mesh, ReducerOptions{.replica_hop = std::make_shared<quant::LocoHop>()});
        const std::vector<float> gradient(4096, 1.0F);
        reducer->register_parameter({.name = "w", .shape = {4096}});
        const auto step = [&] {
          reducer->begin_microbatch({.last = true});
          reducer->gradient_ready(0, {gradient.data(), Dtype::kF32, mesh.device(), {4096}, {}});
          reducer->end_microbatch();
          static_cast<void>(reducer->found_inf());
        };
        step();
        static_cast<void>(world.exchange("", "is ready"));
        nccl_stand_in().hang(0);
        nccl_stand_in().hang_aborts();
        static_cast<void>(world.exchange("", "goes on"));
        std::exception_ptr error;
        try {
          step();
        } catch (...) {
          error = std::current_exception();
        }
        const auto start = Clock::now();
        reducer->close();
        reducer.reset();  // its memory stays, as the GPU writes to it when it continues
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(40));
        closed.arrive_and_wait();
        if (world.rank() == 0) {
          nccl_stand_in().release();
          released.count_down();
        }
        released.wait();
        if (error) std::rethrow_exception(error);
      },
      kImpatient);
  EXPECT_THAT(texts, Each(HasSubstr("TimeoutError")));
}

TEST(NcclFailure, ARowOfAnAbortedHopIsNaN) {
  for (const bool quantizes : {false, true}) {
    const auto texts = outcomes(2, [&](Communicator& world) {
      const Mesh mesh = mesh_of(world, {2, 1});
      std::shared_ptr<ReplicaHop> hop;
      if (quantizes) hop = std::make_shared<quant::LocoHop>();
      RowReducer rows(mesh,
                      {{.name = "block",
                        .parameters = {{"w", {256}}},
                        .ranges = {{0, 0, 256, 0}},
                        .count = 256}},
                      hop);
      OnGpu on(mesh.device());
      const TensorView row = on.data.view(Dtype::kF32).slice(0, 256);
      std::vector<float> values(256);
      for (const bool hangs : {false, true}) {
        std::ranges::fill(values, 1.0F);
        copy_bytes(row.data, values.data(), row.size_in_bytes(), on.stream);
        on.stream.synchronize();
        static_cast<void>(world.exchange("", "is ready"));
        if (hangs) nccl_stand_in().hang(0);
        rows.reduce(0, {.values = row}, row, on.stream);
        if (hangs) {
          static_cast<void>(world.exchange("", "has reduced"));
          if (world.rank() == 1) world.abort("the test wants it");
        }
        const Event done = on.stream.record();
        EXPECT_TRUE(soon([&] { return done.complete(); }));
        copy_bytes(values.data(), row.data, row.size_in_bytes(), on.stream);
        on.stream.synchronize();
        for (const float value : values) {
          EXPECT_TRUE(hangs ? std::isnan(value) : std::abs(value - 1.0F) < 0.01F) << value;
        }
        rows.end_backward();
        static_cast<void>(rows.begin_finish());
        rows.end_finish();
      }
    });
    EXPECT_THAT(texts, Each(HasSubstr("the test wants it")));
  }
}

TEST(NcclFailure, AGatherThatWasAbortedIsNotTakenForDone) {
  const auto texts = outcomes(
      2,
      [](Communicator& world) {
        const Mesh mesh = mesh_of(world, {1, 2});
        Reducer reducer(mesh);
        const Buffer whole(mesh.device(), 2 * 4096 * sizeof(float));
        const TensorView both = whole.view(Dtype::kF32);
        reducer.register_parameter({.name = "first", .shape = {4096}});
        reducer.register_parameter({.name = "second", .shape = {4096}, .group = "other"});
        zero::ParameterGather gather(reducer,
                                     {{.name = "first", .array = both.slice(0, 4096)},
                                      {.name = "second", .array = both.slice(4096, 4096)}},
                                     4096);
        static_cast<void>(gather.start(0, {}));
        gather.wait(0);
        static_cast<void>(world.exchange("", "is ready"));
        nccl_stand_in().hang(0);
        static_cast<void>(gather.start(1, {}));
        EXPECT_THROW(gather.wait(1), TimeoutError);
        EXPECT_THROW(gather.wait(1), TimeoutError);
        EXPECT_NO_THROW(gather.wait(0));  // it came before the failure
        control_of(world)->throw_if_failed();
      },
      kImpatient);
  EXPECT_THAT(texts, Each(HasSubstr("TimeoutError")));
}

TEST(NcclFailure, AnErrorOfNcclNamesTheCallAndTheRank) {
  const auto texts = outcomes(3, [](Communicator& world) {
    nccl_stand_in().hang(0);
    if (world.rank() == 2) {
      after_next_call(2, [] { nccl_stand_in().set_error(2, ncclSystemError); });
    }
    reduce_and_wait(world, 4);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("RankError: nccl: all_reduce of bucket 4"),
                                HasSubstr("unhandled system error"), HasSubstr("rank 2 of 3"))));
}

TEST(NcclFailure, ARemoteErrorIsALostPeer) {
  const auto texts = outcomes(2, [](Communicator& world) {
    nccl_stand_in().hang(0);
    if (world.rank() == 1) nccl_stand_in().set_error(1, ncclRemoteError);
    reduce_and_wait(world, 2);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("PeerLostError: nccl: all_reduce of bucket 2"),
                                HasSubstr("remote process exited"))));
}

TEST(NcclFailure, AWorldThatEndsElsewhereEndsWhatTheGpuDoes) {
  const auto texts = outcomes(3, [](Communicator& world) {
    nccl_stand_in().hang(1);
    if (world.rank() == 1) {
      after_next_call(1, [world] { Communicator(world).abort("the test wants it"); });
    }
    reduce_and_wait(world, 0);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("RankError"), HasSubstr("the test wants it"))));
}

// An abort completes hanging work, with data that no rank sent.
TEST(NcclFailure, AWaitThatBeginsAfterTheFailureThrowsIt) {
  const auto texts = outcomes(2, [](Communicator& world) {
    nccl_stand_in().hang(0);
    OnGpu gpu(gpu_of(world.rank()));
    gpu.all_reduce(world, 0);
    const Event done = gpu.stream.record();
    if (world.rank() == 1) world.abort("the test wants it");
    EXPECT_TRUE(soon([&] { return done.complete(); }));
    world.wait(done);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("RankError"), HasSubstr("the test wants it"))));
}

struct Collective {
  std::string name;
  // In place on `data`, 8 f32 on each of two ranks. Returns the part that the peers sent.
  std::function<TensorView(Communicator&, TensorView data, const Flag& nonfinite, Stream&)> run;
};

std::ostream& operator<<(std::ostream& out, const Collective& collective) {
  return out << collective.name;
}

class Aborted : public ::testing::TestWithParam<Collective> {};

// An optimizer that reads the result on the GPU must not take garbage for it.
TEST_P(Aborted, WhatThePeersDidNotSendIsNaN) {
  const auto texts = outcomes(2, [](Communicator& world) {
    constexpr std::int64_t kCount = 8;
    const Device gpu = gpu_of(world.rank());
    OnGpu on(gpu);
    const TensorView data = on.data.view(Dtype::kF32).slice(0, kCount);
    std::vector<float> values(kCount, 1.0F);
    copy_bytes(data.data, values.data(), data.size_in_bytes(), on.stream);
    on.stream.synchronize();
    const Flag nonfinite = make_flag(gpu);
    for (const bool hangs : {false, true}) {
      static_cast<void>(world.exchange("", "ready"));
      if (hangs) nccl_stand_in().hang(0);
      const TensorView sent = GetParam().run(world, data, nonfinite, on.stream);
      const Event done = on.stream.record();
      if (hangs) {
        static_cast<void>(world.exchange("", "issued"));
        if (world.rank() == 1) world.abort("the test wants it");
      }
      EXPECT_TRUE(soon([&] { return done.complete(); }));
      copy_bytes(values.data(), data.data, data.size_in_bytes(), on.stream);
      on.stream.synchronize();
      const std::int64_t first =
          static_cast<const float*>(sent.data) - static_cast<const float*>(data.data);
      for (std::int64_t i = 0; i < kCount; ++i) {
        const float value = values[static_cast<std::size_t>(i)];
        const bool of_peers = i >= first && i < first + sent.count;
        if (of_peers) {
          EXPECT_EQ(std::isnan(value), hangs) << value << " at " << i;
        } else {
          EXPECT_EQ(value, 1.0F) << i;
        }
      }
    }
    EXPECT_EQ(*nonfinite != 0, GetParam().name.find("reduce") != std::string::npos);
    world.barrier();
  });
  EXPECT_THAT(texts, Each(HasSubstr("the test wants it")));
}

INSTANTIATE_TEST_SUITE_P(
    Collectives, Aborted,
    ::testing::Values(
        Collective{"all_reduce",
                   [](Communicator& world, TensorView data, const Flag& nonfinite, Stream& stream) {
                     world.all_reduce({.data = data, .nonfinite = nonfinite.get()}, stream);
                     return data;
                   }},
        Collective{"reduce_scatter",
                   [](Communicator& world, TensorView data, const Flag& nonfinite, Stream& stream) {
                     const TensorView out = data.slice(4, 2);
                     world.reduce_scatter(
                         {.in = data.slice(0, 4), .out = out, .nonfinite = nonfinite.get()},
                         stream);
                     return out;
                   }},
        Collective{"all_gather",
                   [](Communicator& world, TensorView data, const Flag&, Stream& stream) {
                     world.all_gather(data.slice(4, 1), data.slice(0, 2), stream);
                     return data.slice(0, 2);
                   }},
        Collective{"all_gather_in_place",
                   [](Communicator& world, TensorView data, const Flag&, Stream& stream) {
                     world.all_gather(data.slice(4 * world.rank(), 4), data, stream);
                     return data.slice(4 - 4 * world.rank(), 4);
                   }},
        Collective{"all_to_all",
                   [](Communicator& world, TensorView data, const Flag&, Stream& stream) {
                     world.all_to_all(data.slice(0, 4), data.slice(4, 4), stream);
                     return data.slice(4, 4);
                   }},
        Collective{"broadcast",
                   [](Communicator& world, TensorView data, const Flag&, Stream& stream) {
                     world.broadcast(data, 0, stream);
                     return data.slice(0, world.rank() == 0 ? 0 : data.count);
                   }}),
    [](const auto& chosen) { return chosen.param.name; });

TEST(NcclFailure, AConnectionThatIsRefusedIsNamedOnEveryRank) {
  for (const bool late : {false, true}) {
    nccl_stand_in().reset();
    nccl_stand_in().fail_call({.rank = 1,
                               .name = "ncclCommInitRankConfig",
                               .result = ncclSystemError,
                               .times = stand_in::kAlways,
                               .late = late});
    EXPECT_THAT(connect(3, gpu_of),
                Each(AllOf(HasSubstr("RankError: nccl: connect: expected success"),
                           HasSubstr("rank 1 of 3"))));
    EXPECT_TRUE(soon([] { return nccl_stand_in().communicators() == 0; }));
  }
}

class WithSharedGpu : public ::testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { ::unsetenv(GetParam()); }
};

TEST_P(WithSharedGpu, IsRefusedUnlessSomebodyAskedForIt) {
  const auto half = [](int rank) { return gpu_of(rank / 2); };
  nccl_stand_in().reset();
  EXPECT_THAT(connect(3, half),
              Each(AllOf(HasSubstr("UsageError: nccl: more ranks than GPUs"), HasSubstr("cuda:0"),
                         HasSubstr("ranks 0 and 1 of 3"), HasSubstr("NCCL_HOSTID"))));
  ::setenv(GetParam(), "1", 1);
  EXPECT_THAT(connect(3, half), Each("nothing"));
}

INSTANTIATE_TEST_SUITE_P(Variables, WithSharedGpu,
                         ::testing::Values("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"));

// Tells the other ranks a different version than this rank's.
class OlderControl : public StageControl {
 public:
  using StageControl::StageControl;
  void post(std::string_view key, std::span<const int> members, const comm::Saying& mine) override {
    comm::Saying said = mine;
    if (key.ends_with("/seats")) {
      std::string& text = said.equal.at(0).value();
      const std::size_t place = text.find("2.28.9");
      if (place != std::string::npos) text.replace(place, 6, "2.20.5");
    }
    StageControl::post(key, members, said);
  }
};

TEST(NcclFailure, DifferentVersionsAreNamed) {
  nccl_stand_in().reset();
  run_ranks(
      3,
      [](Communicator& host) {
        auto control = control_of(host);
        if (host.rank() == 2) control = std::make_shared<OlderControl>(control, Stage{});
        EXPECT_THAT(
            outcome_of([&] { static_cast<void>(comm::nccl_world(control, gpu_of(host.rank()))); }),
            AllOf(HasSubstr("MismatchError"), HasSubstr("expected version 2.28.9 on every rank"),
                  HasSubstr("got 2.20.5 on rank 2 of 3")));
      },
      kUnhurried);
}

TEST(NcclFailure, ARankWithoutItsGpuIsNamedOnTheOthers) {
  nccl_stand_in().reset();
  EXPECT_THAT(connect(2, [](int rank) { return gpu_of(rank == 0 ? 0 : 63); }),
              ElementsAre(HasSubstr("MismatchError: nccl: rank 1 of 2 cannot"),
                          HasSubstr("UsageError: device: cannot use cuda:63")));
}

TEST(NcclFailure, MemoryElsewhereIsRefusedAndNothingIsLost) {
  run_nccl_ranks(2, [](Communicator& world) {
    std::vector<float> host(8, 1.0F);
    const TensorView view{host.data(), 8, Dtype::kF32};
    EXPECT_THAT(
        outcome_of([&] { world.all_reduce(view); }),
        AllOf(HasSubstr("UsageError: all_reduce: expected memory on cuda:"), HasSubstr("got cpu")));
    const Buffer other(gpu_of(7), 400);
    EXPECT_THAT(outcome_of([&] { world.broadcast(other.view(Dtype::kF32)); }),
                HasSubstr("got cuda:7"));
    reduce_and_wait(world, 0);
  });
}

TEST(NcclFailure, NativeSumsAreRefusedOnOtherEngines) {
  run_ranks(2, [](Communicator& host) {
    std::vector<float> data(8, 1.0F);
    const TensorView view{data.data(), 8, Dtype::kF32};
    EXPECT_THAT(
        outcome_of([&] { host.all_reduce({.data = view, .reduction = Reduction::kNative}); }),
        AllOf(HasSubstr("UsageError"), HasSubstr("expected the nccl engine, got host")));
  });
}

}  // namespace
}  // namespace hsdp::test
