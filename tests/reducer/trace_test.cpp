// Traces of all ranks: what they show, and what is left when a rank does not write its own.
#include "hsdp/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <exception>
#include <future>
#include <mutex>
#include <thread>

#include "hsdp/comm/operation_record.h"
#include "hsdp/error.h"
#include "hsdp/log.h"
#include "hsdp/reducer_internal.h"
#include "hsdp/trace_settings.h"
#include "tests/support/process_ranks.h"
#include "tests/support/reducer_step.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/trace_file.h"
#include "tests/support/written_operations.h"

namespace hsdp::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kTracedSteps = 2;
constexpr MeshShape kTwo{.replicate = 1, .shard = 2};

StepCase traced_step(MeshShape shape) {
  return random_step(odd_parameters(Dtype::kF32), shape.size(), {Sync::kShard, Sync::kAll}, 11);
}

class Traced : public testing::Test {
 protected:
  [[nodiscard]] std::filesystem::path path() const { return folder_ / "trace.json"; }
  [[nodiscard]] std::vector<std::string> files() const { return names_in(folder_.path()); }
  // Runs steps before, within and after the trace. Returns the number of buckets.
  [[nodiscard]] int trace_steps(const Mesh& mesh, MeshShape shape) const {
    const StepCase step = traced_step(shape);
    Reducer reducer(mesh, {.bucket_bytes = 4 << 10, .name = "net"});
    register_all(reducer, step);
    static_cast<void>(run_step(reducer, step, mesh.rank()));
    // The other ranks' paths are ignored.
    Trace trace(reducer, mesh.rank() == 0 ? path() : "/nowhere/trace.json");
    for (int i = 0; i < kTracedSteps; ++i) {  // write() waits for the last hops
      run_schedule(reducer, step, mesh.rank());
    }
    trace.write();
    static_cast<void>(run_step(reducer, step, mesh.rank()));
    return reducer.stats().bucket_count;
  }
  void expect_trace(MeshShape shape, int buckets) const {
    EXPECT_GT(buckets, 1);
    const TraceFile trace = read_trace(path());
    expect_whole_trace(trace, shape, kTracedSteps, buckets);
    expect_flows(trace, shape, kTracedSteps, buckets);
    expect_one_clock(trace, shape);
    EXPECT_EQ(trace.other.at("engine"), "host");
    for (const TraceSlice& one : trace.slices) EXPECT_FALSE(one.args.contains("state"));
    EXPECT_THAT(files(), ElementsAre("trace.json"));
  }

  TemporaryDirectory folder_;
};

TEST_F(Traced, ShowsEveryBucketOfEveryThread) {
  int buckets = 0;
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const int count = trace_steps(mesh, kSquare);
    if (mesh.rank() == 0) buckets = count;
  });
  expect_trace(kSquare, buckets);
}

TEST_F(Traced, ShowsEveryBucketOfEveryProcess) {
  const auto outcomes = run_processes(4, {}, [&](int rank) {
    const Mesh mesh = init_mesh({.replicate = 2, .shard = 2});
    const int count = trace_steps(mesh, kSquare);
    if (rank == 0) note(std::to_string(count));
    return 0;
  });
  for (const RankOutcome& outcome : outcomes) ASSERT_TRUE(outcome.ok()) << outcome.error;
  expect_trace(kSquare, std::stoi(outcomes[0].notes.at(0)));
}

// The second bucket begins before the first one has all its gradients. One rank only, as the packs
// of several ranks take turns when staging is short.
TEST_F(Traced, GivesSlicesThatOverlapTracks) {
  run_mesh({.replicate = 1, .shard = 1}, [&](const Mesh& mesh) {
    std::vector<ParameterSpec> parameters;
    for (const char* const name : {"a", "b", "c", "d"}) {
      parameters.push_back({.name = name, .shape = {1024}});
    }
    const StepCase step = random_step(parameters, 1, {Sync::kAll}, 3);
    Reducer reducer(mesh, {.bucket_bytes = 8 << 10});
    register_all(reducer, step);
    Trace trace(reducer, path());
    std::vector<StoredGradient> stored;
    reducer.begin_microbatch();
    for (const int p : {0, 2, 1, 3}) {
      stored.push_back(gradient_of(step, static_cast<std::size_t>(p), 0, mesh.rank()));
      reducer.gradient_ready(p, stored.back().view());
    }
    reducer.end_microbatch();
    trace.write();
    EXPECT_EQ(reducer.stats().bucket_count, 2);
  });
  const TraceFile trace = read_trace(path());
  const std::vector<TraceSlice> packs = trace.of(0, "pack");
  ASSERT_EQ(packs.size(), 2U);
  EXPECT_GT(packs[0].end_us, packs[1].begin_us);
  EXPECT_EQ(trace.tracks.at({0, packs[0].track}), "pack");
  EXPECT_EQ(trace.tracks.at({0, packs[1].track}), "pack 2");
}

TEST_F(Traced, SeesTheOperationsOfOtherReducersToo) {
  run_mesh(kTwo, [&](const Mesh& mesh) {
    const StepCase step = traced_step(kTwo);
    Reducer one(mesh, {.name = "one"});
    Reducer other(mesh, {.name = "other"});
    register_all(one, step);
    register_all(other, step);
    Trace trace(one, path());
    static_cast<void>(run_step(one, step, mesh.rank()));
    static_cast<void>(run_step(other, step, mesh.rank()));
    trace.write();
  });
  std::vector<std::string> titles;
  for (const auto& [track, title] : read_trace(path()).tracks) titles.push_back(title);
  EXPECT_THAT(titles, testing::Contains("shard hop, reducer 'one'"));
  EXPECT_THAT(titles, testing::Contains("shard hop, reducer 'other'"));
}

// As if the Reducers had no name.
TEST_F(Traced, TellsApartReducersOfOneName) {
  run_mesh(kTwo, [&](const Mesh& mesh) {
    const StepCase step = traced_step(kTwo);
    Reducer idle(mesh);
    Reducer one(mesh);
    Reducer other(mesh);
    register_all(one, step);
    register_all(other, step);
    Trace trace(one, path());
    static_cast<void>(run_step(other, step, mesh.rank()));
    static_cast<void>(run_step(one, step, mesh.rank()));
    trace.write();
  });
  const TraceFile trace = read_trace(path());
  for (const int rank : {0, 1}) {
    std::map<std::string, int> titles;
    for (const auto& [track, title] : trace.tracks) titles[title] += track.first == rank ? 1 : 0;
    EXPECT_EQ(titles["shard hop, reducer"], 1);
    EXPECT_EQ(titles["shard hop, reducer #2"], 1);
    EXPECT_EQ(titles["shard hop, reducer #3"], 0);
    // The Reducer that was made first comes first, although the other one ran first.
    const std::vector<TraceSlice> hops = trace.of(rank, "shard_hop");
    EXPECT_EQ(trace.tracks.at({rank, hops.front().track}), "shard hop, reducer #2");
    EXPECT_EQ(trace.tracks.at({rank, hops.back().track}), "shard hop, reducer");
  }
}

// Every hop begins at the same time on all ranks, `seconds` after the one before.
void expect_hops_together(const std::filesystem::path& path, int hops, double seconds) {
  const TraceFile trace = read_trace(path);
  expect_one_clock(trace, kSquare);
  const double error_us = trace.other.at("clock_error_ms").get<double>() * 1e3;
  EXPECT_LT(error_us, 30e3);
  const std::vector<TraceSlice> first = trace.of(0, "shard_hop");
  ASSERT_EQ(std::ssize(first), hops);
  for (int rank = 0; rank < kSquare.size(); ++rank) {
    const std::vector<TraceSlice> slices = trace.of(rank, "shard_hop");
    ASSERT_EQ(slices.size(), first.size());
    for (std::size_t i = 0; i < slices.size(); ++i) {
      EXPECT_NEAR(slices[i].begin_us, first[i].begin_us, error_us) << rank;
      const double after_us = slices[i].begin_us - slices[0].begin_us;
      EXPECT_NEAR(after_us, static_cast<double>(i) * seconds * 1e6, 2 * error_us) << rank;
    }
  }
}

// The clocks run at one rate, or come up to 96 ms apart while the trace runs.
TEST_F(Traced, ShowsRanksWhoseClocksAreApartOnOne) {
  const double start_s = Operations::now_s();
  for (const double drift : {0.0, 80e-6}) {
    constexpr int kHops = 6;
    constexpr double kApart = 100;
    run_mesh(kSquare, [&](const Mesh& mesh) {
      const std::array<double, 4> ahead_s{0, 5, -7, 10};
      const std::array<double, 4> drifts{0, drift, 0, -drift};
      const auto rank = static_cast<std::size_t>(mesh.rank());
      WrittenOperations written(
          mesh, {.start_s = start_s, .ahead_s = ahead_s.at(rank), .drift = drifts.at(rank)});
      Trace trace =
          begin_trace(written.reducer(), path(), {.now_s = [&] { return written.now_s(); }});
      for (int i = 0; i < kHops; ++i) {
        written.write({.kind = OperationKind::kShardHop, .step = i, .microbatch = 0, .index = 0},
                      kApart * i + 1, kApart * i + 1.01);
      }
      written.skip(kApart * kHops);
      trace.write();
    });
    expect_hops_together(path(), kHops, kApart);
  }
}

constexpr int kRecordedHops = 100;

// The messages that rank 1 exchanges to write its hops to `path` in such parts.
std::int64_t messages_to_write(const std::filesystem::path& path, std::size_t part_bytes) {
  std::int64_t count = 0;
  run_mesh(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    const Operations& operations = ReducerInternal(reducer).operations();
    Trace trace = begin_trace(reducer, path, {.part_bytes = part_bytes});
    for (int i = 0; i < kRecordedHops; ++i) {
      for (const OperationKind kind : {OperationKind::kPack, OperationKind::kShardHop}) {
        const double at_s = Operations::now_s();
        const OperationPlace place{
            .kind = kind, .step = i, .microbatch = 0, .index = 0, .bytes = 8};
        operations.end(operations.begin(place, at_s), OperationState::kDone, at_s);
      }
    }
    const std::int64_t before = reducer.stats().control_message_count;
    trace.write();
    if (mesh.rank() == 1) count = reducer.stats().control_message_count - before;
  });
  return count;
}

TEST_F(Traced, IsWrittenInParts) {
  constexpr std::size_t kPartBytes = 4096;
  const std::int64_t messages_of_one_part = messages_to_write(path(), std::size_t{1} << 20U);
  const std::int64_t messages = messages_to_write(path(), kPartBytes);
  EXPECT_GE(messages - messages_of_one_part, 5);
  EXPECT_GT(std::filesystem::file_size(path()), 10 * kPartBytes);
  const TraceFile trace = read_trace(path());
  for (const int rank : {0, 1}) {
    for (const char* const kind : {"pack", "shard_hop"}) {
      const std::vector<TraceSlice> slices = trace.of(rank, kind);
      ASSERT_EQ(slices.size(), static_cast<std::size_t>(kRecordedHops));
      for (int i = 0; i < kRecordedHops; ++i) {
        ASSERT_EQ(slices[static_cast<std::size_t>(i)].arg("step"), i);
      }
    }
  }
  EXPECT_EQ(trace.flows.size(), 2U * kRecordedHops);
  for (const auto& [id, flow] : trace.flows) ASSERT_EQ(flow.size(), 2U);
}

TEST_F(Traced, OfARankAloneNeedsNoOtherClock) {
  run_mesh({.replicate = 1, .shard = 1}, [&](const Mesh& mesh) {
    EXPECT_GT(trace_steps(mesh, {.replicate = 1, .shard = 1}), 0);
  });
  EXPECT_EQ(read_trace(path()).other.at("clock_error_ms"), 0);
}

// Both ranks get the error, and the first trace goes on.
TEST_F(Traced, RefusesASecondOneAtOnce) {
  run_mesh(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    Reducer other(mesh, {.name = "other"});
    Trace trace(reducer, path());
    for (Reducer* const which : {&reducer, &other}) {
      EXPECT_THAT(caught<UsageError>([&] { const Trace second(*which, folder_ / "second.json"); }),
                  says("trace: begin: expected no other trace in this job, got one that runs; end "
                       "it first"));
    }
    trace.write();
    EXPECT_THAT(
        caught<UsageError>([&] { trace.write(); }),
        says("trace: write: expected a trace that runs, got one that has ended; make another "
             "Trace"));
    Trace(reducer, path()).write();
  });
  EXPECT_THAT(files(), ElementsAre("trace.json"));
}

// Only one rank has an open microbatch; the other ranks are told why the call fails.
TEST_F(Traced, IsRefusedWithinAMicrobatch) {
  run_patiently(kTwo, [&](const Mesh& mesh) {
    const StepCase step = traced_step(kTwo);
    Reducer reducer(mesh);
    register_all(reducer, step);
    static_cast<void>(run_step(reducer, step, mesh.rank()));
    const std::string own =
        "reducer: trace: expected no open microbatch, got one; call end_microbatch first";
    const auto begin = [&] { const Trace trace(reducer, path()); };
    if (mesh.rank() == 1) reducer.begin_microbatch();
    if (mesh.rank() == 1) {
      EXPECT_THAT(caught<UsageError>(begin), says(own));
    } else {
      EXPECT_THAT(caught<StepAbortedError>(begin),
                  says(HasSubstr("rank 1 of 2 could not begin its trace: " + own)));
      reducer.begin_microbatch();
    }
    reducer.abandon_step("it was a try");
    Trace trace(reducer, path());
    if (mesh.rank() == 1) {
      reducer.begin_microbatch();
      EXPECT_THAT(caught<UsageError>([&] { trace.write(); }), says(own));
    } else {
      EXPECT_THAT(caught<StepAbortedError>([&] { trace.write(); }),
                  says("trace: write: expected every rank to write its trace, got '" + own +
                       "' on rank 1 of 2; no file was written"));
      reducer.begin_microbatch();
    }
    reducer.abandon_step("it was a try");
  });
  EXPECT_THAT(files(), ElementsAre());
}

void call_something_else(const Reducer& reducer) {
  ReducerInternal(reducer).together("do something else", [] {});
}

// Both ranks learn of it at once and are in step again.
TEST_F(Traced, WhoseEndMeetsAnotherCallIsAMismatch) {
  run_patiently(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    const auto block = [&] {
      Trace trace(reducer, path());
      if (mesh.rank() == 1) call_something_else(reducer);
      trace.write();
    };
    EXPECT_THAT(caught<MismatchError>(block),
                says(HasSubstr("expected 'write its trace' on every rank, got 'do something else' "
                               "on rank 1 of 2")));
    if (mesh.rank() == 0) {
      EXPECT_THAT(files(), ElementsAre());
    }
    call_something_else(reducer);
    Trace(reducer, path()).write();
    call_something_else(reducer);
  });
}

TEST_F(Traced, ThatARankLeavesIsAMismatchOfAnotherCall) {
  run_patiently(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    Trace trace(reducer, path());
    if (mesh.rank() == 1) return trace.leave("it has seen enough");
    EXPECT_THAT(caught<MismatchError>([&] { call_something_else(reducer); }),
                says(HasSubstr("got 'write its trace' on rank 1 of 2")));
  });
  EXPECT_THAT(files(), ElementsAre());
}

std::mutex lines_mutex;
std::vector<std::string> lines;
void keep_line(LogLevel /*level*/, std::string line) {
  const std::scoped_lock lock(lines_mutex);
  lines.push_back(std::move(line));
}

TEST_F(Traced, WarnsOfAForgottenWrite) {
  set_log_sink(keep_line, static_cast<int>(LogLevel::kWarning));
  run_mesh({.replicate = 1, .shard = 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    { const Trace forgotten(reducer, path()); }
    EXPECT_THAT(lines, ElementsAre("hsdp: trace: left without write(): no file is written"));
    lines.clear();
    Trace(reducer, path()).write();
    Trace(reducer, path()).leave("no more");
    try {
      const Trace raised(reducer, path());
      throw std::runtime_error("mine");
    } catch (const std::runtime_error&) {
    }
    EXPECT_THAT(lines, ElementsAre());
  });
  set_log_sink(nullptr, 0);
}

TEST_F(Traced, ThatCannotBeginBeginsNowhere) {
  run_mesh(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    const auto begin = [&] { const Trace trace(reducer, folder_ / "none" / "trace.json"); };
    for (int i = 0; i < 2; ++i) {
      if (mesh.rank() == 0) {
        EXPECT_THAT(caught<Error>(begin), says(HasSubstr("trace: cannot create ")));
      } else {
        EXPECT_THAT(
            caught<StepAbortedError>(begin),
            says(AllOf(HasSubstr("rank 0 of 2 could not begin its trace: trace: cannot create "))));
      }
    }
    Trace(reducer, path()).write();
  });
}

// A folder is in the file's place.
TEST_F(Traced, ThatCannotBeWrittenIsAnErrorOnEveryRank) {
  std::filesystem::create_directories(path() / "inside");
  run_mesh(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    Trace trace(reducer, path());
    EXPECT_THAT(caught<Error>([&] { trace.write(); }),
                says(AllOf(HasSubstr("trace: cannot rename "), HasSubstr("(rank 0 of 2)"))));
  });
  EXPECT_THAT(files(), ElementsAre("trace.json"));
}

// A rank whose block raises does not wait for the others, which learn of it when they end theirs.
TEST_F(Traced, ThatARankLeavesIsWrittenByNone) {
  for (const int leaver : {0, 1}) {
    run_mesh(kTwo, [&](const Mesh& mesh) {
      const StepCase step = traced_step(kTwo);
      Reducer reducer(mesh);
      register_all(reducer, step);
      const auto block = [&] {
        Trace trace(reducer, path());
        if (mesh.rank() == leaver) throw std::runtime_error("mine");
        trace.write();
      };
      if (mesh.rank() == leaver) {
        EXPECT_THROW(block(), std::runtime_error);
      } else {
        const std::string rank = "rank " + std::to_string(leaver) + " of 2";
        EXPECT_THAT(caught<StepAbortedError>(block),
                    says("trace: write: expected every rank to write its trace, got 'its block "
                         "raised an exception' on " +
                         rank + "; no file was written"));
      }
      static_cast<void>(run_step(reducer, step, mesh.rank()));
    });
    EXPECT_THAT(files(), ElementsAre());
  }
}

// The rank takes the others' next step with them, whether they are in it when the rank leaves or
// begin it later.
TEST_F(Traced, ThatARankLeavesLosesNoStep) {
  struct Left : std::exception {};
  constexpr std::chrono::seconds kLimit{60};
  for (const bool is_early : {true, false}) {
    std::promise<void> has_left;
    std::promise<void> is_within;
    const StepCase step = traced_step(kTwo);
    std::vector<RankResult> results(2);
    expect_result(kTwo, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
      RankResult& result = results[static_cast<std::size_t>(mesh.rank())];
      static_cast<void>(run_step(reducer, step, mesh.rank()));
      const auto block = [&] {
        Trace trace(reducer, path());
        if (mesh.rank() == 1) {
          if (!is_early) {
            EXPECT_EQ(is_within.get_future().wait_for(kLimit), std::future_status::ready);
          }
          throw Left();
        }
        if (is_early) {
          EXPECT_EQ(has_left.get_future().wait_for(kLimit), std::future_status::ready);
        }
        is_within.set_value();
        result = run_step(reducer, step, mesh.rank());
        trace.write();
      };
      if (mesh.rank() == 1) {
        EXPECT_THROW(block(), Left);
        has_left.set_value();
        result = run_step(reducer, step, mesh.rank());
      } else {
        EXPECT_THAT(caught<StepAbortedError>(block), says(HasSubstr("on rank 1 of 2; no file")));
      }
      static_cast<void>(run_step(reducer, step, mesh.rank()));
    });
    expect_reference(results, step, {}, kTwo, "the step that only one rank traced");
    EXPECT_THAT(files(), ElementsAre());
  }
}

// A Reducer's first step sets it up, which is a call of all ranks. Both are in step again
// afterwards.
TEST_F(Traced, ThatARankLeavesIsAMismatchOfTheFirstStep) {
  const StepCase step = traced_step(kTwo);
  expect_result(kTwo, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    const auto take_step = [&] { static_cast<void>(run_step(reducer, step, mesh.rank())); };
    const auto block = [&] {
      Trace trace(reducer, path());
      if (mesh.rank() == 1) throw std::runtime_error("mine");
      take_step();
    };
    if (mesh.rank() == 1) {
      EXPECT_THROW(block(), std::runtime_error);
      EXPECT_THAT(caught<MismatchError>(take_step), says(HasSubstr("'write its trace'")));
    } else {
      EXPECT_THAT(caught<MismatchError>(block),
                  says(HasSubstr("got 'write its trace' on rank 1 of 2")));
    }
    take_step();
  });
  EXPECT_THAT(files(), ElementsAre());
}

// The rank's exception ends its program or closes its mesh. The others hear of it long before their
// timeout, which is longer than the test may take.
TEST_F(Traced, ARankThatLeavesAndClosesIsLostToTheOthersSteps) {
  for (const bool is_early : {true, false}) {
    ProcessRanks ranks(4, {}, [&](int rank) {
      const StepCase step = traced_step(kSquare);
      try {
        const Mesh mesh = init_mesh({.replicate = 2, .shard = 2, .timeout_s = 600});
        Reducer reducer(mesh);
        register_all(reducer, step);
        static_cast<void>(run_step(reducer, step, rank));
        Trace trace(reducer, path());
        if (rank == 2) {
          if (!is_early) ::raise(SIGSTOP);
          throw std::runtime_error("mine");
        }
        if (is_early) ::raise(SIGSTOP);
        note("steps");
        static_cast<void>(run_step(reducer, step, rank));
      } catch (const PeerLostError& error) {
        note(error.what());
      } catch (const std::runtime_error& error) {
        note(error.what());
        if (rank == 2) ::pause();  // its process lives on
      }
      return 0;
    });
    if (is_early) {
      ASSERT_TRUE(ranks.wait_for_note(2, "mine"));
    } else {
      for (const int rank : {0, 1, 3}) ASSERT_TRUE(ranks.wait_for_note(rank, "steps"));
    }
    for (const int rank : is_early ? std::vector{0, 1, 3} : std::vector{2}) {
      ASSERT_TRUE(ranks.wait_until_stopped(rank));
      ranks.signal(rank, SIGCONT);
    }
    for (const int rank : {0, 1, 3}) ASSERT_TRUE(ranks.wait_for_end(rank));
    ranks.signal(2, SIGKILL);
    const auto outcomes = ranks.finish();
    for (const std::size_t rank : {0U, 1U, 3U}) {
      EXPECT_TRUE(outcomes[rank].ok()) << outcomes[rank].error;
      EXPECT_THAT(outcomes[rank].notes,
                  ElementsAre("steps", HasSubstr("rank 2 of 4 was lost (it closed its world)")));
    }
    EXPECT_THAT(files(), ElementsAre());
  }
}

TEST_F(Traced, IsReplacedAsAWholeOrNotAtAll) {
  std::ofstream(path()) << "before";
  const auto content = [&] {
    std::ifstream file(path());
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  run_mesh(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    Trace trace(reducer, path());
  });
  EXPECT_EQ(content(), "before");
  run_mesh(kTwo, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    Trace(reducer, path()).write();
  });
  EXPECT_THAT(content(), HasSubstr("traceEvents"));
}

// Before the file is written and while it is being written, it is either whole or absent. The
// timeout is longer than the test may take.
TEST_F(Traced, OfARankThatDiesIsAnErrorOfTheOthers) {
  for (const int victim : {3, 0}) {
    for (int tries = 0; tries < 4; ++tries) {
      std::filesystem::remove(path());
      const auto outcomes = run_processes(4, {}, [&](int rank) {
        const Mesh mesh = init_mesh({.replicate = 2, .shard = 2, .timeout_s = 600});
        const StepCase step = traced_step(kSquare);
        Reducer reducer(mesh, {.bucket_bytes = 4 << 10});
        register_all(reducer, step);
        Trace trace(reducer, path());
        for (int i = 0; i < 20; ++i) static_cast<void>(run_step(reducer, step, rank));
        if (rank == victim) {
          if (tries == 0) ::_exit(3);
          std::thread([tries] {
            std::this_thread::sleep_for(std::chrono::milliseconds(4 * tries));
            ::_exit(3);
          }).detach();
        }
        try {
          trace.write();
          note("written");
        } catch (const PeerLostError& error) {
          note(error.ranks() == std::vector{victim} ? error.what() : "blames another rank");
        }
        if (rank == victim) ::pause();
        return 0;
      });
      const std::string lost = "rank " + std::to_string(victim) + " of 4 was lost (";
      const bool is_whole = std::filesystem::exists(path());
      for (int rank = 0; rank < 4; ++rank) {
        const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
        if (rank == victim) continue;
        EXPECT_TRUE(outcome.ok()) << outcome.error;
        if (tries == 0 || !is_whole) {
          EXPECT_THAT(outcome.notes, ElementsAre(HasSubstr(lost)));
        } else {
          EXPECT_THAT(outcome.notes, ElementsAre(AnyOf("written", HasSubstr(lost))));
        }
      }
      if (is_whole) {
        EXPECT_EQ(read_trace(path()).ranks.size(), 4U);
      }
      if (victim != 0) {
        EXPECT_THAT(files(), AnyOf(ElementsAre(), ElementsAre("trace.json")));
      }
    }
  }
}

}  // namespace
}  // namespace hsdp::test
