// Hops whose work on a GPU ends late, and memory of the RowReducer that kernels still use, on the
// stand-in for the CUDA runtime.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/device/host_event.h"
#include "hsdp/error.h"
#include "hsdp/row_reducer.h"
#include "tests/support/flipping_hop.h"

namespace hsdp::test {
namespace {

using ::testing::HasSubstr;

using std::chrono::milliseconds;

constexpr MeshShape kTwoReplicas{2, 1};
constexpr std::int64_t kRowCount = 8;

std::vector<RowGroup> two_rows(std::int64_t count = kRowCount) {
  std::vector<RowGroup> groups;
  for (const std::string name : {"early", "late"}) {
    groups.push_back({.name = name,
                      .parameters = {{name + ".w", {count}}},
                      .ranges = {{0, 0, count, 0}},
                      .count = count});
  }
  return groups;
}

// The plain hop, whose Events complete later, on another thread.
class SlowHop final : public ReplicaHop {
 public:
  SlowHop(milliseconds delay, bool fails) : delay_(delay), fails_(fails) {}

  [[nodiscard]] std::string describe() const override { return "late"; }
  void prepare(const HopPlan& plan) override { plain_.prepare(plan); }
  void bind(Communicator scatter, Communicator gather) override {
    if (last_.valid()) last_.wait();
    plain_.bind(std::move(scatter), std::move(gather));
  }
  Event reduce(const HopBucket& bucket, Stream& stream) override {
    static_cast<void>(plain_.reduce(bucket, stream));
    if (last_.valid()) last_.wait();
    runs_ = true;
    const auto done = std::make_shared<HostEvent>();
    last_ = std::async(std::launch::async, [this, done] {
      std::this_thread::sleep_for(delay_);
      runs_ = false;
      done->finish(fails_ ? std::make_exception_ptr(Error("hop: the codec failed")) : nullptr);
    });
    return Event(done);
  }
  void end_step(const StepEnd& end) override {
    if (runs_) ended_while_it_ran_ = true;
    ends_.push_back(end);
  }

  [[nodiscard]] bool ended_while_it_ran() const { return ended_while_it_ran_; }
  [[nodiscard]] const std::vector<StepEnd>& ends() const { return ends_; }

 private:
  milliseconds delay_;
  bool fails_;
  PlainHop plain_;
  std::future<void> last_;
  std::atomic<bool> runs_ = false;
  bool ended_while_it_ran_ = false;
  std::vector<StepEnd> ends_;
};

TEST(CudaReducer, AHopThatFailsLateEndsTheWorld) {
  const StepCase step = random_step({{.name = "w", .shape = {64}}}, 2, {Sync::kAll}, 11);
  run_gpu_mesh(kTwoReplicas, [&](const Mesh& mesh) {
    const auto hop = std::make_shared<SlowHop>(milliseconds(50), mesh.rank() == 1);
    {
      Reducer reducer(mesh, {.replica_hop = hop});
      GpuRank rank(reducer, step, mesh);
      const auto fails = [&] {
        rank.run();
        static_cast<void>(reducer.found_inf());
      };
      EXPECT_THAT(fails, ::testing::ThrowsMessage<Error>(HasSubstr("hop: the codec failed")));
    }
    ASSERT_EQ(hop->ends().size(), 1U);
    EXPECT_EQ(hop->ends().front().outcome, StepOutcome::kDropped);
  });
}

// One rank's two rows of ones, on a stream of the GPU.
class GpuRows {
 public:
  explicit GpuRows(const Mesh& mesh, std::shared_ptr<ReplicaHop> hop = {}) {
    rows.emplace(mesh, two_rows(), std::move(hop), 1);
  }
  ~GpuRows() {
    rows.reset();
    static_cast<void>(caught<Error>([this] { stream.synchronize(); }));  // before values go
  }
  GpuRows(const GpuRows&) = delete;
  GpuRows& operator=(const GpuRows&) = delete;

  void set_last(bool last, const std::vector<int>& groups = {0, 1}) {
    rows->set_requires_all_reduce(last, groups);
  }
  void give(int group) {
    const TensorView row{values_[static_cast<std::size_t>(group)].data(), kRowCount, Dtype::kF32,
                         kGpu};
    if (rows->requires_all_reduce(group)) {
      rows->reduce(group, {.values = row}, row, stream);
    } else {
      rows->keep(group, {.values = row}, stream);
    }
  }
  void backward() {
    give(1);
    give(0);
    rows->end_backward();
  }
  // The stream does nothing until that Event, which takes a while.
  Event block() {
    blocker_.run([] { std::this_thread::sleep_for(milliseconds(200)); });
    Event end = blocker_.record();
    stream.wait(end);
    return end;
  }

  Stream stream = Stream::create(kGpu, "caller");
  std::optional<RowReducer> rows;

 private:
  std::array<std::vector<float>, 2> values_{std::vector<float>(kRowCount, 1),
                                            std::vector<float>(kRowCount, 1)};
  Stream blocker_ = Stream::host_worker("blocker");
};

// A later call raises a hop's error, on every rank, whatever the caller does next.
TEST(CudaRows, ALateErrorOfAHopEndsTheWorldWithItsText) {
  for (const bool finishes : {false, true}) {
    const auto start = std::chrono::steady_clock::now();
    run_gpu_mesh(kTwoReplicas, [&](const Mesh& mesh) {
      const bool fails = mesh.rank() == 1;
      GpuRows rank(mesh, std::make_shared<SlowHop>(milliseconds(20), fails));
      const auto error = caught<Error>([&] {
        for (int step = 0; step < 3; ++step) {
          rank.set_last(true);
          rank.backward();
          if (!finishes) continue;
          static_cast<void>(rank.rows->begin_finish());
          rank.rows->end_finish();
        }
      });
      ASSERT_TRUE(error);
      EXPECT_THAT(error->what(), HasSubstr("hop: the codec failed"));
      if (!fails) {
        EXPECT_THAT(error->what(), HasSubstr("rank 1 of 2"));
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
}

TEST(CudaRows, AStepEndsForItsHopWhenTheHopIsDone) {
  run_gpu_mesh(kTwoReplicas, [](const Mesh& mesh) {
    const auto hop = std::make_shared<SlowHop>(milliseconds(50), false);
    GpuRows rank(mesh, hop);
    rank.set_last(false, {0});
    rank.backward();  // one row is reduced over the replicas
    rank.set_last(true);
    if (mesh.rank() == 1) {
      rank.rows->abandon_step("on purpose");
    } else {
      EXPECT_TRUE(caught<StepAbortedError>([&] { rank.backward(); }));
    }
    rank.set_last(true);
    rank.backward();
    static_cast<void>(rank.rows->begin_finish());
    rank.rows->end_finish();
    EXPECT_FALSE(hop->ended_while_it_ran());
  });
}

TEST(CudaRows, SumsLiveUntilKernelsHaveUsedThem) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    run_gpu_mesh(kTwoReplicas, [fails](const Mesh& mesh) {
      GpuRows rank(mesh);
      const Event blocked = rank.block();
      rank.set_last(false);
      rank.give(0);
      if (fails) {
        Communicator world = mesh.world();
        static_cast<void>(world.exchange({}, "test"));
        world.abort("on purpose");
        EXPECT_TRUE(caught<Error>([&] { rank.set_last(true); }));
      }
      rank.rows.reset();
      EXPECT_TRUE(blocked.complete()) << "the sum's memory is gone";
    });
  }
}

TEST(CudaRows, SumsOfOtherSizesWaitForKernels) {
  run_gpu_mesh(kTwoReplicas, [](const Mesh& mesh) {
    GpuRows rank(mesh);
    const Event blocked = rank.block();
    rank.set_last(false);
    rank.give(0);
    rank.rows->abandon_step("on purpose");
    rank.rows->set_groups(two_rows(kRowCount / 2));
    EXPECT_TRUE(blocked.complete()) << "the sum's memory is gone";
  });
}

TEST(CudaRows, VerifyEveryNamesAFlippedBit) {
  for (const bool flips : {false, true}) {
    run_gpu_mesh(kTwoReplicas, [flips](const Mesh& mesh) {
      const auto when =
          flips && mesh.rank() == 1 ? FlippingHop::When::kAfterSum : FlippingHop::When::kNever;
      GpuRows rank(mesh, std::make_shared<FlippingHop>(FlippingHop::Flip{when, 1, 0, 77}));
      const auto error = caught<MismatchError>([&] {
        for (int step = 0; step < 3; ++step) {
          rank.set_last(true);
          rank.backward();
        }
      });
      EXPECT_EQ(error.has_value(), flips);
      if (error) {
        EXPECT_THAT(error->what(), HasSubstr("the same result of 'early.w' of early"));
      }
    });
  }
}

}  // namespace
}  // namespace hsdp::test
