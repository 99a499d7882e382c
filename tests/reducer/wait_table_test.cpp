// Who waited for whom, where one rank comes late.
#include "hsdp/wait_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "hsdp/error.h"
#include "tests/support/process_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr int kSteps = 3;
constexpr std::chrono::milliseconds kDelay{60};

StepCase waited_step(MeshShape shape, std::vector<Sync> schedule = {Sync::kShard, Sync::kAll}) {
  return random_step(odd_parameters(Dtype::kF32), shape.size(), std::move(schedule), 7);
}

// That rank comes late to each step.
WaitTable table_of(const Mesh& mesh, const StepCase& step, int late) {
  Reducer reducer(mesh, {.bucket_bytes = 4 << 10});
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
                                 "operations .clock error [0-9.]+ ms.")));
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

// What another Reducer with the same name did cannot be told apart, and is left out.
TEST(WaitTable, ComparesOnlyWhatCanBeToldApart) {
  run_mesh({.replicate = 1, .shard = 2}, [](const Mesh& mesh) {
    const StepCase step = waited_step({.replicate = 1, .shard = 2});
    for (const bool named : {true, false}) {
      Reducer one(mesh, {.name = named ? "one" : "same"});
      Reducer other(mesh, {.name = named ? "other" : "same"});
      for (Reducer* const reducer : {&one, &other}) {
        register_all(*reducer, step);
        static_cast<void>(run_step(*reducer, step, mesh.rank()));
      }
      const std::int64_t of_named = 2 * (2 * one.stats().bucket_count + 2);
      EXPECT_EQ(one.wait_table().operations, of_named);
    }
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

// The others hear of a rank that ends while they compare.
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
