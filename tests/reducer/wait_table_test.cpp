// Which ranks waited for which, when one rank comes late.
#include "hsdp/wait_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "hsdp/comm/operation_record.h"
#include "hsdp/error.h"
#include "hsdp/reducer/compare_waits.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/process_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr int kSteps = 3;
constexpr std::chrono::milliseconds kDelay{150};  // longer than a busy machine holds up all ranks

StepCase waited_step(MeshShape shape, std::vector<Sync> schedule = {Sync::kShard, Sync::kAll}) {
  return random_step(odd_parameters(Dtype::kF32), shape.size(), std::move(schedule), 7);
}

// The rank that comes late to each step.
WaitTable table_of(const Mesh& mesh, const StepCase& step, int late) {
  Reducer reducer(mesh);
  register_all(reducer, step);
  for (int i = 0; i < kSteps; ++i) {
    if (mesh.rank() == late) std::this_thread::sleep_for(kDelay);
    static_cast<void>(run_step(reducer, step, mesh.rank()));
  }
  return reducer.wait_table();
}

double total(const WaitTable& table, int awaited) {
  double seconds = 0;
  for (const WaitTable::Wait& wait : table.waits) {
    if (wait.awaited == awaited) seconds += wait.seconds;
  }
  return seconds;
}

void expect_named(const WaitTable& table, MeshShape shape, int late) {
  ASSERT_EQ(table.straggler, late) << table.text();
  EXPECT_GT(total(table, late), 0.5 * kSteps * std::chrono::duration<double>(kDelay).count());
  EXPECT_LT(table.clock_error_s, std::chrono::duration<double>(kDelay).count() / 2);
  for (const WaitTable::Wait& wait : table.waits) {
    EXPECT_NE(wait.waiting, wait.awaited);
    EXPECT_GE(wait.seconds, table.clock_error_s);
    EXPECT_TRUE(wait.waiting >= 0 && wait.waiting < shape.size());
  }
  EXPECT_THAT(table.text(),
              AllOf(HasSubstr("rank " + std::to_string(late) + " was waited for "),
                    MatchesRegex(".* was waited for [0-9.]+ s by [0-9]+ ranks? in [0-9]+ "
                                 "operations, 3 steps, [0-9.]+ s .clock error [0-9.]+ ms.*")));
}

TEST(WaitTable, NamesTheRankThatComesLate) {
  for (const int late : {0, 2, 3}) {
    std::vector<WaitTable> tables(4);
    run_mesh(kSquare, [&](const Mesh& mesh) {
      tables[static_cast<std::size_t>(mesh.rank())] = table_of(mesh, waited_step(kSquare), late);
    });
    for (const WaitTable& table : tables) {
      expect_named(table, kSquare, late);
      EXPECT_EQ(table.text(), tables[0].text());
      EXPECT_EQ(table.operations, tables[0].operations);
    }
  }
}

// Rank 3 comes late to its replica hops with rank 1 because it has waited for rank 2.
TEST(WaitTable, FollowsAChainOfWaitsToItsBeginning) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const WaitTable table = table_of(mesh, waited_step(kSquare, {Sync::kAll}), 2);
    const double delay_s = std::chrono::duration<double>(kDelay).count();
    for (const WaitTable::Wait& wait : table.waits) {
      if (wait.awaited != 2) {
        EXPECT_LT(wait.seconds, delay_s);
      }
    }
    EXPECT_GT(total(table, 2), 3 * delay_s);  // all others waited
  });
}

TEST(WaitTable, ComparesEveryOperationOfEveryGroupOnce) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const StepCase step = waited_step(kSquare);
    Reducer reducer(mesh, {.bucket_bytes = 4 << 10});
    register_all(reducer, step);
    static_cast<void>(run_step(reducer, step, mesh.rank()));
    const std::int64_t buckets = reducer.stats().bucket_count;
    EXPECT_GT(buckets, 1);
    // Two microbatches in two shard groups, the last one's replica hop in two replicate groups.
    EXPECT_EQ(reducer.wait_table().operations, 2 * 2 * buckets + 2 * buckets + 2);
  });
}

TEST(WaitTable, NamesNobodyWhereNothingWasCompared) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    const WaitTable table = reducer.wait_table();
    EXPECT_EQ(table.operations, 0);
    EXPECT_EQ(table.straggler, std::nullopt);
    EXPECT_THAT(table.text(), HasSubstr("no rank was waited for in 0 operations"));
  });
  run_mesh({.replicate = 1, .shard = 1}, [](const Mesh& mesh) {
    EXPECT_EQ(table_of(mesh, waited_step({.replicate = 1, .shard = 1}), 0).operations, 0);
  });
}

// The table does not mix in the operations of another Reducer of the same name.
TEST(WaitTable, ComparesTheOperationsOfItsReducer) {
  run_mesh({.replicate = 1, .shard = 2}, [](const Mesh& mesh) {
    const StepCase step = waited_step({.replicate = 1, .shard = 2});
    for (int made = 0; made < 2; ++made) {
      Reducer one(mesh);
      Reducer other(mesh);
      for (Reducer* const reducer : {&one, &other}) {
        register_all(*reducer, step);
        static_cast<void>(run_step(*reducer, step, mesh.rank()));
      }
      static_cast<void>(run_step(other, step, mesh.rank()));
      EXPECT_EQ(one.wait_table().operations, 2 * one.stats().bucket_count + 2);
      EXPECT_EQ(one.wait_table().steps, 1);
      EXPECT_EQ(other.wait_table().operations, 2 * (2 * one.stats().bucket_count + 2));
      EXPECT_EQ(other.wait_table().steps, 2);
    }
  });
}

// A rank whose clock has an offset and another rate.
struct RankClock {
  double start_s = Operations::now_s();  // when it is `ahead_s` ahead
  double ahead_s = 0;
  double drift = 0;

  [[nodiscard]] double at(double after_start_s) const {
    return start_s + ahead_s + (1 + drift) * after_start_s;
  }
  [[nodiscard]] double now_s() const { return at(Operations::now_s() - start_s); }
};

// Writes operations with made-up times, relative to the start.
class WrittenOperations {
 public:
  WrittenOperations(const Mesh& mesh, const RankClock& clock) : reducer_(mesh), clock_(clock) {}

  void write(const OperationPlace& place, double begin_s, double end_s) {
    const Operations& operations = ReducerInternal(reducer_).operations();
    operations.end(operations.begin(place, clock_.at(begin_s)), OperationState::kDone,
                   clock_.at(end_s));
  }
  void write_word(std::int64_t step, double begin_s, double end_s) {
    write({.kind = OperationKind::kWord, .step = step}, begin_s, end_s);
  }
  [[nodiscard]] WaitTable table() {
    return reducer::compare_waits(ReducerInternal(reducer_).groups(),
                                  [this] { return clock_.now_s(); });
  }

 private:
  Reducer reducer_;
  RankClock clock_;
};

TEST(WaitTable, ComparesRanksWhoseClocksAreApart) {
  const double start_s = Operations::now_s();
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const double ahead_s = mesh.rank() == 2 ? -7 : 5 * mesh.rank();
    WrittenOperations written(mesh, {.start_s = start_s, .ahead_s = ahead_s});
    for (int step = 0; step < 3; ++step) {
      const double at_s = 0.1 * step - 1;
      written.write_word(step, mesh.rank() == 2 ? at_s + 0.06 : at_s, at_s + 0.061);
    }
    const WaitTable table = written.table();
    EXPECT_EQ(table.straggler, 2);
    EXPECT_EQ(table.operations, 3);
    EXPECT_EQ(table.steps, 3);
    EXPECT_LT(table.clock_error_s, 0.03);
    EXPECT_NEAR(table.span_s, 0.26, 2 * table.clock_error_s);
    EXPECT_NEAR(total(table, 2), 9 * 0.06, 9 * table.clock_error_s);
    EXPECT_EQ(table.waits.size(), 3U);
    EXPECT_EQ(table.unexplained_s, 0);
  });
}

// The clocks agree now; they were 96 ms apart.
TEST(WaitTable, BlamesNoRankForTheDriftOfItsClock) {
  const double start_s = Operations::now_s();
  for (const bool is_late : {false, true}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      const double drift = mesh.rank() == 1 ? 80e-6 : mesh.rank() == 3 ? -80e-6 : 0;
      WrittenOperations written(mesh, {.start_s = start_s, .drift = drift});
      written.write_word(0, is_late && mesh.rank() == 2 ? -599 : -600, -598);
      const WaitTable table = written.table();
      EXPECT_EQ(table.operations, 1);
      EXPECT_NEAR(table.clock_error_s, 0.12, 0.03);
      EXPECT_EQ(table.straggler, is_late ? std::optional(2) : std::nullopt) << table.text();
      EXPECT_NEAR(total(table, 2), is_late ? 3 : 0, 3 * 0.05);
    });
  }
}

// Rank 3 is late with a word after an operation that only its record has.
TEST(WaitTable, LeavesUnexplainedWhatMayBeAnotherRanksFault) {
  const double start_s = Operations::now_s();
  run_mesh(kSquare, [&](const Mesh& mesh) {
    WrittenOperations written(mesh, {.start_s = start_s});
    if (mesh.rank() == 3) written.write({.kind = OperationKind::kShardHop, .index = 0}, -1.8, -1.1);
    written.write_word(0, mesh.rank() == 3 ? -1 : -2, -0.9);
    const WaitTable table = written.table();
    EXPECT_EQ(table.operations, 1);
    EXPECT_NEAR(table.unexplained_s, 3 * 0.7, 0.05);
    EXPECT_NEAR(total(table, 3), 3 * 0.3, 0.05);
    EXPECT_THAT(table.text(), HasSubstr(" s of waits unexplained)"));
  });
}

// The record no longer tells what the rank did before its oldest operation.
TEST(WaitTable, LeavesUnexplainedWhatHasBeenOverwritten) {
  const double start_s = Operations::now_s();
  run_mesh(kSquare, [&](const Mesh& mesh) {
    WrittenOperations written(mesh, {.start_s = start_s});
    for (std::size_t i = 0; mesh.rank() == 3 && i < OperationRecord::kCapacity; ++i) {
      written.write({.kind = OperationKind::kWait}, -1.4, -1.39);
    }
    written.write_word(0, mesh.rank() == 3 ? -1 : -2, -0.9);
    const WaitTable table = written.table();
    EXPECT_EQ(table.operations, 1);
    EXPECT_NEAR(table.unexplained_s, 3 * 0.6, 0.05);
    EXPECT_NEAR(total(table, 3), 3 * 0.4, 0.05);
  });
}

TEST(WaitTable, IsRefusedWithinAMicrobatch) {
  run_mesh({.replicate = 1, .shard = 1}, [](const Mesh& mesh) {
    const StepCase step = waited_step({.replicate = 1, .shard = 1});
    Reducer reducer(mesh);
    register_all(reducer, step);
    const Microbatch microbatch(reducer, {.last = true});
    EXPECT_THAT(caught<UsageError>([&] { static_cast<void>(reducer.wait_table()); }),
                says(HasSubstr("wait_table")));
  });
}

TEST(WaitTable, NamesTheProcessThatComesLate) {
  const auto outcomes = run_processes(4, {}, [](int) {
    const Mesh mesh = init_mesh({.replicate = 2, .shard = 2});
    const WaitTable table = table_of(mesh, waited_step(kSquare), 2);
    note(table.straggler ? std::to_string(*table.straggler) : "none");
    note(std::to_string(table.clock_error_s < 0.03));
    return 0;
  });
  for (const RankOutcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error, "");
    EXPECT_THAT(outcome.notes, ::testing::ElementsAre("2", "1"));
  }
}

// A rank ends while the others compare; they get its error.
TEST(WaitTable, EndsWithTheErrorOfALostRank) {
  const auto outcomes = run_processes(4, {}, [](int rank) {
    const Mesh mesh = init_mesh({.replicate = 2, .shard = 2});
    Reducer reducer(mesh);
    if (rank == 3) ::_exit(3);
    try {
      static_cast<void>(reducer.wait_table());
    } catch (const PeerLostError& error) {
      note(error.what());
    }
    return 0;
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)].notes,
                ::testing::ElementsAre(HasSubstr("rank 3 of 4")));
  }
}

}  // namespace
}  // namespace hsdp::test
