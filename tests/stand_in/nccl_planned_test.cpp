// Planned calls: compared with the peers' the first time, made without a message from then on;
// differences are found all the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gpu_rank.h"
#include "hsdp/device/buffer.h"
#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "hsdp/row_reducer.h"
#include "nccl_ranks.h"
#include "quant/loco_hop.h"
#include "zero/parameter_gather.h"
#include "zero/unit_gather.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Many buckets and units; fewer under ThreadSanitizer, which makes each slow.
#if defined(__SANITIZE_THREAD__)
constexpr int kMany = 40;
constexpr int kManyUnits = 16;
#else
constexpr int kMany = 400;
constexpr int kManyUnits = 64;
#endif

std::int64_t messages_of(const Communicator& world) {
  std::int64_t count = 0;
  for (const ControlLinkStats& link : control_of(world)->links()) count += link.sent_count;
  return count;
}

// Memory of one rank and the stream that uses it.
struct OnGpu {
  explicit OnGpu(const Communicator& world)
      : in(gpu_of(world.rank()), 4096),
        out(gpu_of(world.rank()), 4096),
        stream(Stream::create(gpu_of(world.rank()), "caller")) {}
  ~OnGpu() {
    try {
      stream.synchronize();
    } catch (const Error&) {  // it was thrown to the test
    }
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  [[nodiscard]] TensorView rows(int count) const { return in.view(Dtype::kF32).slice(0, count); }
  [[nodiscard]] TensorView sums(int count) const { return out.view(Dtype::kF32).slice(0, count); }

  Buffer in;
  Buffer out;
  Stream stream;
};

TEST(NcclPlanned, CallsSendNothingFromTheSecondTimeOn) {
  run_nccl_ranks(3, [](Communicator& world) {
    OnGpu gpu(world);
    ReduceScatter scattered{
        .in = gpu.rows(300), .out = gpu.sums(100), .bucket = 0, .planned = true};
    AllReduce summed{.data = gpu.sums(100), .wire = Dtype::kBf16, .bucket = 1, .planned = true};
    world.reserve(std::span(&scattered, 1));
    world.reserve(std::span(&summed, 1));
    const auto round = [&](double divisor) {
      scattered.divisor = summed.divisor = divisor;
      world.reduce_scatter(scattered, gpu.stream);
      world.all_reduce(summed, gpu.stream);
      world.all_gather(gpu.sums(100), gpu.rows(300), gpu.stream, std::nullopt, {2, true});
      world.all_to_all(gpu.rows(300), gpu.sums(300), gpu.stream, std::nullopt, {3, true});
    };
    round(1.0);
    std::vector<std::int64_t> sent;  // a rank that has to wait for seconds tells the others
    for (const double divisor : {1.0, 2.0, 3.0, 4.0}) {
      const std::int64_t before = messages_of(world);
      round(divisor);
      world.wait(gpu.stream.record());
      sent.push_back(messages_of(world) - before);
    }
    EXPECT_EQ(std::ranges::min(sent), 0);
    const std::int64_t before = messages_of(world);
    world.all_reduce(gpu.sums(100), gpu.stream);
    EXPECT_GE(messages_of(world), before + 1) << "of a free call";
    world.wait(gpu.stream.record());
  });
}

// All ranks have made four calls twice. Says which of them a rank makes once more: 11 is call 1
// with one element more, and 101 is call 1 in bf16.
using Calls = std::vector<int>;

AllReduce call_of(const OnGpu& gpu, int number) {
  const std::int64_t count = 10 + number % 10;
  const Dtype dtype = number < 100 ? Dtype::kF32 : Dtype::kBf16;
  return {.data = gpu.in.view(dtype).slice(0, number < 10 ? count : count + 1),
          .bucket = number % 10,
          .planned = true};
}

TEST(NcclPlanned, WhatDiffersOnOneRankIsNamedOnAll) {
  struct Row {
    Calls of_rank_1;
    std::string expected;
    std::string got;
  };
  const std::vector<Row> rows{
      {{0, 11, 2, 3}, "all_reduce of 11 f32 of bucket 1", "all_reduce of 12 f32 of bucket 1"},
      {{0, 101, 2, 3}, "all_reduce of 11 f32 of bucket 1", "all_reduce of 12 bf16 of bucket 1"},
      {{0, 2, 1, 3}, "all_reduce of 11 f32 of bucket 1", "all_reduce of 12 f32 of bucket 2"},
      {{0, 2, 3}, "all_reduce of 11 f32 of bucket 1", "all_reduce of 12 f32 of bucket 2"},
  };
  for (const Row& row : rows) {
    const auto start = std::chrono::steady_clock::now();
    const auto errors = try_nccl_ranks(3,
                                       [&](Communicator& world) {
                                         OnGpu gpu(world);
                                         const auto make_all = [&](const Calls& calls) {
                                           for (const int number : calls)
                                             world.all_reduce(call_of(gpu, number), gpu.stream);
                                         };
                                         const AllReduce longest = call_of(gpu, 13);
                                         world.reserve(std::span(&longest, 1));
                                         const Calls all{0, 1, 2, 3};
                                         make_all(all);
                                         make_all(all);
                                         world.wait(gpu.stream.record());
                                         make_all(world.rank() == 1 ? row.of_rank_1 : all);
                                         world.wait(gpu.stream.record());
                                         world.barrier();
                                       },
                                       {.timeout = milliseconds(60'000)});
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(30'000)) << "by a timeout";
    for (const std::exception_ptr& error : errors) {
      ASSERT_TRUE(error);
      try {
        std::rethrow_exception(error);
      } catch (const MismatchError& mismatch) {
        EXPECT_THAT(mismatch.what(),
                    AllOf(HasSubstr(row.expected), HasSubstr(row.got), HasSubstr("(rank 1)"),
                          AnyOf(HasSubstr("(rank 0)"), HasSubstr("(rank 2)"))));
      }
    }
  }
}

// Two Reducers, one with LoCo, and gathers of parameters beside them; with `units` also those of
// stage 3. Returns how many messages this rank had sent by the end of each step. A rank that is
// held up for long asks again.
std::vector<std::int64_t> messages_of_lanes(const Mesh& mesh, int count, int steps,
                                            bool has_units) {
  ReducerOptions options{.reduce_dtype = Dtype::kF32, .bucket_bytes = 256};
  Reducer first(mesh, options);
  options.replica_hop = std::make_shared<quant::LocoHop>();
  Reducer second(mesh, options);
  Stream stream = Stream::create(mesh.device(), "caller");
  std::vector<Buffer> memory;
  const auto array = [&](std::int64_t elements) {
    memory.emplace_back(mesh.device(), elements * 4);
    return memory.back().view(Dtype::kF32);
  };
  for (int p = 0; p < count; ++p) {
    for (Reducer* const reducer : {&first, &second}) {
      reducer->register_parameter({.name = "w" + std::to_string(p), .shape = {64}});
    }
  }
  first.prepare();
  std::vector<zero::GatheredParameter> gathered;
  std::vector<zero::ParameterUnit> units;
  std::vector<TensorView> wholes;
  for (int p = 0; p < count; ++p) {
    const std::string name = "w" + std::to_string(p);
    gathered.push_back({.name = name, .array = array(64)});
    const TensorView stored = array(first.slice(name).count);
    units.push_back({.name = name, .parameters = {{name, Dtype::kF32, 64, stored}}});
    wholes.push_back(array(64));
  }
  zero::ParameterGather gather(first, gathered, 256);
  std::optional<zero::UnitGather> unit_gather;
  if (has_units) unit_gather.emplace(first, units);
  const std::vector<float> gradient(64, 1.0F);
  std::vector<std::int64_t> after;
  for (int step = 0; step < steps; ++step) {
    gather.start_all(stream.record());
    for (const bool last : {false, true}) {
      for (int u = 0; has_units && u < count; ++u) {
        unit_gather->gather(u, {wholes[static_cast<std::size_t>(u)]}, stream.record());
        unit_gather->wait(u, stream);
      }
      for (Reducer* const reducer : {&first, &second}) {
        Microbatch open(*reducer, {.last = last});
        for (int p = 0; p < count; ++p) {
          reducer->gradient_ready(p, {gradient.data(), Dtype::kF32, mesh.device(), {64}, {}});
        }
        open.end();
      }
      if (has_units) unit_gather->end(stream.record());
    }
    EXPECT_FALSE(first.found_inf());
    EXPECT_FALSE(second.found_inf());
    if (has_units) stream.wait(unit_gather->begin_update(stream.record()));
    gather.wait_all();
    after.push_back(first.stats().control_message_count);
  }
  return after;
}

// On each rank, the fewest messages in one of the last steps.
std::vector<std::int64_t> fewest_messages(int count, bool has_units) {
  const int steps = has_units ? 12 : 6;
  std::vector<std::int64_t> fewest(4);
  run_nccl_mesh({2, 2}, [&](const Mesh& mesh) {
    const std::vector<std::int64_t> after = messages_of_lanes(mesh, count, steps, has_units);
    std::int64_t& least = fewest[static_cast<std::size_t>(mesh.rank())];
    least = after.back();
    for (std::size_t step = after.size() / 2; step < after.size(); ++step) {
      least = std::min(least, after[step] - after[step - 1]);
    }
  });
  return fewest;
}

// From the fourth step on, when two whole steps have been alike.
TEST(NcclPlanned, LanesSendAsMuchForManyBucketsAsForFew) {
  for (const int count : {4, kMany}) {
    EXPECT_THAT(fewest_messages(count, false), ::testing::Each(6)) << "4 words, 2 bits";
  }
}

TEST(NcclPlanned, UnitsSendAsMuchForManyAsForFew) {
  for (const int count : {4, kManyUnits}) {
    // Rank 0 answers the others.
    EXPECT_THAT(fewest_messages(count, true), ::testing::ElementsAre(17, 13, 13, 13))
        << "4 words, 2 bits, 4 of passes, 2 first buckets, one update";
  }
}

// One replica reduces the second bucket before the first, and both have the same size: without a
// comparison of calls each replica would get sums of the other bucket, and no rank would notice.
class InOtherOrder : public ReplicaHop {
 public:
  explicit InOtherOrder(bool turns) : turns_(turns) {}
  [[nodiscard]] std::string describe() const override { return "in other order"; }
  [[nodiscard]] bool needs_gather_group() const override { return false; }
  void bind(Communicator scatter, Communicator /*gather*/) override {
    replicas_ = std::move(scatter);
  }
  Event reduce(const HopBucket& bucket, Stream& stream) override {
    const AllReduce sum = plain_sum(bucket, Reduction::kExact);
    if (turns_ && bucket.bucket == 0) {
      first_ = sum;
      return {};
    }
    replicas_.all_reduce(sum, stream);
    if (first_) replicas_.all_reduce(*std::exchange(first_, std::nullopt), stream);
    return {};
  }
  void set_turns(bool turns) { turns_ = turns; }

 private:
  bool turns_;
  std::optional<AllReduce> first_;
  Communicator replicas_;
};

TEST(NcclPlanned, BucketsInAnotherOrderAreFoundAtTheStepsEnd) {
  const auto errors = try_nccl_ranks(
      2,
      [](Communicator& world) {
        const Mesh mesh = mesh_of(world, {2, 1});
        const auto hop = std::make_shared<InOtherOrder>(false);
        Reducer reducer(mesh,
                        {.reduce_dtype = Dtype::kF32, .bucket_bytes = 256, .replica_hop = hop});
        for (const char* name : {"a", "b"}) {
          reducer.register_parameter({.name = name, .shape = {64}});
        }
        const std::vector<float> gradient(64, 1.0F);
        for (int step = 0; step < 3; ++step) {
          hop->set_turns(step == 2 && world.rank() == 1);
          reducer.begin_microbatch({.last = true});
          for (int p = 0; p < 2; ++p) {
            reducer.gradient_ready(p, {gradient.data(), Dtype::kF32, mesh.device(), {64}, {}});
          }
          reducer.end_microbatch();
          EXPECT_FALSE(reducer.found_inf());
        }
      },
      {.timeout = milliseconds(60'000)});
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error);
    try {
      std::rethrow_exception(error);
    } catch (const MismatchError& mismatch) {
      EXPECT_THAT(mismatch.what(),
                  AllOf(HasSubstr("expected all_reduce of 64 f32 of bucket 0 (rank 0)"),
                        HasSubstr("got all_reduce of 64 f32 of bucket 1 (rank 1)")));
    }
  }
}

// Rows of modules of one size.
struct Rows {
  Rows(const Mesh& mesh, int count, std::shared_ptr<ReplicaHop> hop = {})
      : memory(mesh.device(), 64 * sizeof(float)), stream(Stream::create(mesh.device(), "caller")) {
    std::vector<RowGroup> groups;
    for (int g = 0; g < count; ++g) {
      const std::string name = "module " + std::to_string(g);
      groups.push_back({.name = name,
                        .parameters = {{.name = name, .shape = {64}}},
                        .ranges = {{.count = 64}},
                        .count = 64});
    }
    reducer.emplace(mesh, std::move(groups), std::move(hop));
  }
  void reduce(int group, int shard_size = 2) {
    const TensorView row = memory.view(Dtype::kF32);
    reducer->reduce(group, {.values = row, .shard_size = shard_size}, row, stream);
  }

  Buffer memory;
  Stream stream;
  std::optional<RowReducer> reducer;
};

TEST(NcclPlanned, RowsSendAsMuchForManyModulesAsForFew) {
  std::map<int, std::vector<std::int64_t>> messages;  // by number of modules
  for (const bool quantizes : {false, true}) {
    for (const int count : {2, 60}) {
      std::mutex mutex;
      run_nccl_mesh({2, 2}, [&](const Mesh& mesh) {
        Rows rows(mesh, count, quantizes ? std::make_shared<quant::LocoHop>() : nullptr);
        std::vector<std::int64_t> after;
        for (int step = 0; step < 4; ++step) {
          for (int group = 0; group < count; ++group) rows.reduce(group);
          rows.reducer->end_backward();
          after.push_back(messages_of(mesh.world()));
        }
        const std::lock_guard lock(mutex);
        messages[count].push_back(std::min(after[2] - after[1], after[3] - after[2]));
      });
    }
    EXPECT_EQ(messages[2], messages[60]);
    EXPECT_THAT(messages[2], ::testing::Each(3)) << "a word, what was called, and a bit";
    messages.clear();
  }
}

// Both ranks are told at the end of a backward that differs on rank 1.
void expect_mismatch_of_rows(const std::function<void(Rows&, int rank)>& backward,
                             const testing::Matcher<std::string>& message) {
  const auto errors = try_nccl_ranks(2,
                                     [&](Communicator& world) {
                                       Rows rows(mesh_of(world, {2, 1}), 2);
                                       for (const int rank : {0, 0, world.rank()}) {
                                         backward(rows, rank);
                                         rows.reducer->end_backward();
                                       }
                                       EXPECT_EQ(world.rank(), 0) << "goes on";
                                     },
                                     {.timeout = milliseconds(60'000)});
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error);
    try {
      std::rethrow_exception(error);
    } catch (const MismatchError& mismatch) {
      EXPECT_THAT(mismatch.what(), message);
    }
  }
}

TEST(NcclPlanned, RowsInAnotherOrderAreFoundAtTheBackwardsEnd) {
  expect_mismatch_of_rows(
      [](Rows& rows, int rank) {
        rows.reduce(rank);
        rows.reduce(1 - rank);
      },
      AllOf(HasSubstr("expected all_reduce of 64 f32 of bucket 0 (rank 0)"),
            HasSubstr("got all_reduce of 64 f32 of bucket 1 (rank 1)")));
}

TEST(NcclPlanned, RowsOfOtherSumsAreFoundAtTheBackwardsEnd) {
  expect_mismatch_of_rows([](Rows& rows, int rank) { rows.reduce(0, rank == 0 ? 2 : 1); },
                          HasSubstr("expected the same collectives of its buckets or rows"));
}

// After drops, sums reduced by finish(), and other parameters the ranks' calls are still equal.
TEST(NcclPlanned, RowsGoOnAfterDropsFinishesAndOtherParameters) {
  for (const bool quantizes : {false, true}) {
    run_nccl_mesh({2, 1}, [&](const Mesh& mesh) {
      Rows rows(mesh, 3, quantizes ? std::make_shared<quant::LocoHop>() : nullptr);
      RowReducer& reducer = *rows.reducer;
      const auto step = [&] {
        for (const int group : {0, 1, 2}) rows.reduce(group);
        reducer.end_backward();
      };
      const std::vector<int> all{0, 1, 2};
      for (int round = 0; round < 3; ++round) {
        step();
        reducer.set_requires_all_reduce(false, all);
        if (mesh.world().rank() == 0) {  // the other rank has no gradient of that module
          reducer.keep(1, {.values = rows.memory.view(Dtype::kF32)}, rows.stream);
        }
        reducer.set_requires_all_reduce(true, all);
        for (const int group : {0, 2}) rows.reduce(group);
        reducer.end_backward();
        for (const int group : reducer.begin_finish()) {
          const TensorView total = rows.memory.view(Dtype::kF32);
          reducer.reduce(group, {}, total, rows.stream);
        }
        reducer.end_finish();
        if (mesh.world().rank() == 1) {
          reducer.keep(0, {.values = rows.memory.view(Dtype::kF32)}, rows.stream);
          reducer.abandon_step("for once");
        } else {
          EXPECT_THROW(rows.reduce(0), StepAbortedError);
        }
        step();
      }
    });
  }
}

}  // namespace
}  // namespace hsdp::test
