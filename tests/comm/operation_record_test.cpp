// The ring of operations: what it keeps, and what it returns while other threads write.
#include "hsdp/comm/operation_record.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

namespace hsdp {
namespace {

constexpr OperationPlace kHop{
    .kind = OperationKind::kShardHop, .step = 7, .microbatch = 2, .index = 12, .bytes = 4096};

class Recorded : public testing::Test {
 protected:
  [[nodiscard]] std::vector<RecordedOperation> read() const { return record_->read().operations; }

  std::shared_ptr<OperationRecord> record_ = std::make_shared<OperationRecord>();
  Operations operations_{record_,
                         {.name = "reducer 'x'", .replicate = 1, .shard = 2, .ranks = {4, 6}}};
};

TEST_F(Recorded, SaysWhatBeganAndHowItEnded) {
  const double before = Operations::now_s();
  {
    const Operation done(operations_, kHop);
    ASSERT_EQ(read().size(), 1U);
    EXPECT_EQ(read()[0].state, OperationState::kBegun);
    EXPECT_EQ(read()[0].end_s, 0);
  }
  EXPECT_THROW(
      {
        const Operation failed(operations_, kHop);
        throw std::runtime_error("as a hop may");
      },
      std::runtime_error);
  Operation issued(operations_, {.kind = OperationKind::kGather, .turn = 3});
  issued.end(OperationState::kIssued);
  const auto all = read();
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0].state, OperationState::kDone);
  EXPECT_EQ(all[1].state, OperationState::kFailed);
  EXPECT_EQ(all[2].state, OperationState::kIssued);
  EXPECT_EQ(all[0].place.kind, OperationKind::kShardHop);
  EXPECT_EQ(all[0].place.step, 7);
  EXPECT_EQ(all[0].place.microbatch, 2);
  EXPECT_EQ(all[0].place.turn, -1);
  EXPECT_EQ(all[0].place.index, 12);
  EXPECT_EQ(all[0].place.bytes, 4096);
  EXPECT_EQ(all[2].place.turn, 3);
  EXPECT_GE(all[0].begin_s, before);
  EXPECT_GE(all[0].end_s, all[0].begin_s);
  EXPECT_GE(all[2].begin_s, all[1].end_s);
  const auto sources = record_->read().sources;
  ASSERT_EQ(sources.count(all[0].source), 1U);
  EXPECT_EQ(sources.at(all[0].source).name, "reducer 'x'");
  EXPECT_EQ(sources.at(all[0].source).ranks, (std::vector<int>{4, 6}));
}

TEST_F(Recorded, KeepsTheLastThousand) {
  const std::int64_t first = operations_.begin(kHop);
  for (int i = 1; i <= 1000; ++i) {
    const Operation one(operations_, {.kind = OperationKind::kWord, .step = i});
  }
  operations_.end(first, OperationState::kFailed);  // another operation has its place
  const auto all = read();
  ASSERT_EQ(all.size(), 1000U);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(all[static_cast<std::size_t>(i)].number, i + 1);
    EXPECT_EQ(all[static_cast<std::size_t>(i)].place.step, i + 1);
    EXPECT_EQ(all[static_cast<std::size_t>(i)].state, OperationState::kDone);
  }
}

TEST_F(Recorded, AddsUpTimesByKind) {
  const Operations lane = operations_.of("lane 'gather'", "1");
  EXPECT_EQ(operations_.seconds(OperationKind::kGather), 0);
  operations_.add(OperationKind::kGather, 1.5);
  lane.add(OperationKind::kGather, 0.25);
  EXPECT_EQ(operations_.seconds(OperationKind::kGather), 1.75);
  EXPECT_EQ(operations_.seconds(OperationKind::kPack), 0);
  {
    const Operation slow(lane, {.kind = OperationKind::kWord});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_GE(operations_.seconds(OperationKind::kWord), 0.005);
  EXPECT_EQ(read().size(), 1U);
  EXPECT_EQ(record_->read().sources.at(read()[0].source).name, "lane 'gather'");
}

TEST_F(Recorded, EndsOnceWhenItIsHandedOn) {
  std::optional<Operation> kept;
  {
    Operation begun(operations_, kHop);
    kept.emplace(std::move(begun));
  }
  EXPECT_EQ(read()[0].state, OperationState::kBegun);
  kept.reset();
  EXPECT_EQ(read()[0].state, OperationState::kDone);
}

TEST_F(Recorded, ForgetsSourcesThatAreGoneWhenThereAreMany) {
  for (int i = 0; i < 200; ++i) const Operations gone(record_, {.name = "gone"});
  const auto sources = record_->read().sources;
  EXPECT_LE(sources.size(), 64U);
  EXPECT_EQ(sources.at(0).name, "reducer 'x'");  // the name outlives its source
}

// Each writer's entries have the same number in all fields, so two numbers in one show a torn
// entry.
TEST_F(Recorded, IsReadWholeWhileOthersWrite) {
  std::atomic<bool> over{false};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      for (int i = w; !over; i = (i + 2) % 100'000) {
        const Operation one(operations_, {.step = i, .microbatch = i, .turn = i, .index = i});
      }
    });
  }
  std::int64_t seen = 0;
  while (seen < 100'000) {
    for (const RecordedOperation& one : read()) {
      ++seen;
      ASSERT_EQ(one.place.step, one.place.microbatch);
      ASSERT_EQ(one.place.step, one.place.turn);
      ASSERT_EQ(one.place.step, one.place.index);
    }
  }
  over = true;
  for (std::thread& writer : writers) writer.join();
}

TEST(Operations, RecordNothingByThemselves) {
  const Operations none;
  { const Operation one(none, kHop); }
  EXPECT_EQ(none.seconds(OperationKind::kShardHop), 0);
  EXPECT_EQ(none.of("lane", "1").seconds(OperationKind::kShardHop), 0);
}

TEST(OperationNames, AreThoseOfTheFile) {
  EXPECT_EQ(name(OperationKind::kReplicaHop), "replica_hop");
  EXPECT_EQ(name(OperationKind::kWait), "wait");
  EXPECT_EQ(name(OperationState::kFailed), "failed");
}

TEST_F(Recorded, KeepsAllOperationsWhileATraceRuns) {
  const std::int64_t before = operations_.begin(kHop);
  ASSERT_TRUE(record_->start_trace());
  EXPECT_FALSE(record_->start_trace());
  operations_.end(before, OperationState::kDone);
  const std::size_t count = OperationRecord::kMostTraced + 7;
  for (std::size_t i = 0; i < count; ++i) {
    OperationPlace place = kHop;
    place.step = static_cast<std::int64_t>(i);
    const std::int64_t number = operations_.begin(place);
    if (i != 2) operations_.end(number, OperationState::kIssued);
  }
  const OperationRecord::Trace trace = record_->take_trace();
  EXPECT_EQ(trace.dropped_count, 7);
  ASSERT_EQ(trace.contents.operations.size(), OperationRecord::kMostTraced);
  EXPECT_FALSE(trace.contents.sources.empty());
  for (std::size_t i = 0; i < trace.contents.operations.size(); ++i) {
    const RecordedOperation& one = trace.contents.operations[i];
    ASSERT_EQ(one.place.step, static_cast<std::int64_t>(i));
    ASSERT_EQ(one.state, i == 2 ? OperationState::kBegun : OperationState::kIssued);
    ASSERT_EQ(one.end_s >= one.begin_s, i != 2);
  }
  const Operation after(operations_, kHop);
  ASSERT_TRUE(record_->start_trace());
  const OperationRecord::Trace next = record_->take_trace();
  EXPECT_TRUE(next.contents.operations.empty());
  EXPECT_EQ(next.dropped_count, 0);
}

TEST_F(Recorded, IsTracedWhileThreadsWrite) {
  std::atomic<bool> stops{false};
  std::vector<std::jthread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!stops) const Operation one(operations_, kHop);
    });
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(record_->start_trace());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const RecordedOperation& one : record_->take_trace().contents.operations) {
      ASSERT_EQ(one.place.bytes, kHop.bytes);
      ASSERT_TRUE(one.state == OperationState::kBegun || one.end_s >= one.begin_s);
    }
  }
  stops = true;
}

}  // namespace
}  // namespace hsdp
