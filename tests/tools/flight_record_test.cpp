// Flight records of real jobs that hang or lose a rank, and what hsdp_check finds in them.
#include "hsdp/flight_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "hsdp/error.h"
#include "hsdp/row_reducer.h"
#include "tests/support/command_outcome.h"
#include "tests/support/process_ranks.h"
#include "tests/support/reducer_step.h"
#include "tests/support/temporary_directory.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kEnded = 10;
constexpr MeshShape kPair{.replicate = 1, .shard = 2};

class FlightRecord : public testing::Test {
 protected:
  [[nodiscard]] ProcessOptions options() const {
    ProcessOptions options;
    options.environment["HSDP_FLIGHT_DIR"] = folder_.path();
    return options;
  }
  [[nodiscard]] json record(int rank) const {
    std::ifstream file(folder_ / ("rank_" + std::to_string(rank) + ".json"));
    return json::parse(file, nullptr, false);
  }
  [[nodiscard]] bool has_record(int rank) const {
    return std::filesystem::exists(folder_ / ("rank_" + std::to_string(rank) + ".json"));
  }
  [[nodiscard]] bool await_record(int rank) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!has_record(rank) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return has_record(rank);
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
  }
  [[nodiscard]] CommandOutcome check() const {
    return run_command(HSDP_CHECK " --flight " + folder_.path().string());
  }

  TemporaryDirectory folder_;
};

Mesh mesh_of(MeshShape shape, double timeout_s = 30.0) {
  return init_mesh({.replicate = shape.replicate, .shard = shape.shard, .timeout_s = timeout_s});
}

StepCase some_step(MeshShape shape) {
  return random_step(odd_parameters(Dtype::kF32), shape.size(), {Sync::kShard, Sync::kAll}, 9);
}

// Runs steps until one fails. After step 1 the given rank notes that and calls `stall`.
int run_until_error(MeshShape shape, double timeout_s, int who,
                    const std::function<void()>& stall) {
  const StepCase step = some_step(shape);
  const Mesh mesh = mesh_of(shape, timeout_s);
  Reducer reducer(mesh, {.bucket_bytes = 4 << 10, .name = "net"});
  register_all(reducer, step);
  try {
    for (int i = 0;; ++i) {
      if (i == 2 && mesh.rank() == who) {
        note("stalls");
        stall();
      }
      run_step(reducer, step, mesh.rank());
    }
  } catch (const RankError& error) {
    note(error.what());
    return kEnded;
  }
}

json last_of(const json& record, const std::string& kind) {
  json last;
  for (const json& one : record.at("operations")) {
    if (one.at("kind") == kind) last = one;
  }
  return last;
}

TEST_F(FlightRecord, NamesTheRankThatDoesNotComeToItsMicrobatch) {
  ProcessRanks ranks(4, options(),
                     [](int) { return run_until_error(kSquare, 2.0, 3, [] { ::pause(); }); });
  ASSERT_TRUE(ranks.wait_for_note(3, "stalls"));
  for (const int rank : {0, 1, 2}) ASSERT_TRUE(ranks.wait_for_end(rank));
  ASSERT_TRUE(await_record(3));  // it learns of the end while it stalls
  for (int rank = 0; rank < 4; ++rank) {
    const json one = record(rank);
    ASSERT_TRUE(one.is_object()) << rank;
    EXPECT_EQ(one.at("rank"), rank);
    EXPECT_EQ(one.at("size"), 4);
    EXPECT_EQ(one.at("engine"), "host");
    EXPECT_EQ(one.at("replicate"), 2);
    EXPECT_EQ(one.at("shard"), 2);
    EXPECT_EQ(one.at("reason"), "failure");
    EXPECT_THAT(one.at("error").get<std::string>(), HasSubstr("rank 3 of 4"));
  }
  const json hop = last_of(record(2), "shard_hop");
  EXPECT_EQ(hop.at("step"), 2);
  EXPECT_EQ(hop.at("microbatch"), 0);
  EXPECT_NE(hop.at("state"), "done");
  EXPECT_EQ(last_of(record(3), "shard_hop").at("step"), 1);
  const CommandOutcome findings = check();
  EXPECT_EQ(findings.status, 1);
  EXPECT_THAT(findings.output,
              HasSubstr("flight records of 4 of 4 ranks of the job that began at "));
  EXPECT_THAT(findings.output, HasSubstr("the others waited for rank 3 of 4\n"));
  EXPECT_THAT(findings.output,
              HasSubstr("shard_hop of bucket 0, step 2, microbatch 0 (reducer 'net')"
                        ": rank 2 of 4 waited in it for "));
  EXPECT_THAT(findings.output, HasSubstr("had not come: rank 3 of 4"));
  EXPECT_THAT(findings.output, HasSubstr("the last operation that all ranks completed: "));
  ranks.signal(3, SIGKILL);
}

TEST_F(FlightRecord, NamesARankThatWasKilledAndLeftNone) {
  ProcessRanks ranks(4, options(), [](int) {
    return run_until_error(kSquare, 30.0, 1, [] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the other ranks wait by then
      ::raise(SIGKILL);
    });
  });
  const auto outcomes = ranks.finish();
  for (const int rank : {0, 2, 3}) {
    EXPECT_EQ(outcomes[static_cast<std::size_t>(rank)].exit_code, kEnded);
    EXPECT_THAT(record(rank).at("error").get<std::string>(), HasSubstr("rank 1 of 4"));
  }
  EXPECT_FALSE(has_record(1));
  const CommandOutcome findings = check();
  EXPECT_EQ(findings.status, 1);
  EXPECT_THAT(findings.output, AllOf(HasSubstr("flight records of 3 of 4 ranks "),
                                     HasSubstr("\nrank 1 of 4 left no record\n"),
                                     HasSubstr("the others waited for rank 1 of 4\n")));
}

TEST_F(FlightRecord, NamesARankThatWasStopped) {
  ProcessRanks ranks(2, options(),
                     [](int) { return run_until_error(kPair, 1.5, 1, [] { ::raise(SIGSTOP); }); });
  ASSERT_TRUE(ranks.wait_for_end(0));
  const CommandOutcome stopped = check();
  EXPECT_THAT(stopped.output, AllOf(HasSubstr("rank 1 of 2 left no record\n"),
                                    HasSubstr("the others waited for rank 1 of 2\n")));
  ranks.signal(1, SIGCONT);
  EXPECT_EQ(ranks.finish()[1].exit_code, kEnded);
  EXPECT_THAT(check().output, HasSubstr("flight records of 2 of 2 ranks of the job "));
}

// The job has not ended: the signal asks a running job for its record.
TEST_F(FlightRecord, IsWrittenOnSigusr1) {
  ProcessRanks ranks(2, options(), [](int rank) {
    const StepCase step = some_step(kPair);
    const Mesh mesh = mesh_of(kPair);
    Reducer reducer(mesh);
    register_all(reducer, step);
    run_step(reducer, step, rank);
    note("ran");
    if (rank == 1) {  // keeps the other in its first hop
      sigset_t set;
      sigemptyset(&set);
      sigaddset(&set, SIGUSR2);
      pthread_sigmask(SIG_BLOCK, &set, nullptr);
      int number = 0;
      note("blocks");
      ::sigwait(&set, &number);
    }
    run_step(reducer, step, rank);
    mesh.world().barrier();
    return 0;
  });
  ASSERT_TRUE(ranks.wait_for_note(0, "ran"));
  ASSERT_TRUE(ranks.wait_for_note(1, "blocks"));
  std::string text;
  bool sleeps = false;  // rank 0 may not have reached its hop, or be about to sleep in it
  for (int tries = 0; tries < 200 && !sleeps; ++tries) {
    for (const int rank : {0, 1}) {
      std::filesystem::remove(folder_ / ("rank_" + std::to_string(rank) + ".json"));
      ranks.signal(rank, SIGUSR1);
      ASSERT_TRUE(await_record(rank));
      EXPECT_EQ(record(rank).at("reason"), "signal");
      EXPECT_EQ(record(rank).at("error"), "");
    }
    text = check().output;
    sleeps = text.find("waited in it") != std::string::npos && !record(0).at("waits").empty();
  }
  EXPECT_TRUE(sleeps);
  EXPECT_THAT(text, HasSubstr("the others waited for rank 1 of 2\n"));
  EXPECT_THAT(text, HasSubstr("rank 0 of 2 waited in it for "));
  ranks.signal(1, SIGUSR2);
  for (const RankOutcome& outcome : ranks.finish()) EXPECT_TRUE(outcome.ok()) << outcome.error;
}

std::atomic<int> own_signals{0};
extern "C" void count_signal(int /*signal*/) { ++own_signals; }

TEST_F(FlightRecord, LeavesAHandlerOfTheApplication) {
  const auto outcomes = run_processes(1, options(), [](int) {
    std::signal(SIGUSR1, count_signal);
    const StepCase step = some_step({1, 1});
    Reducer reducer(mesh_of({1, 1}));
    register_all(reducer, step);
    run_step(reducer, step, 0);
    ::raise(SIGUSR1);
    return own_signals == 1 ? 0 : 1;
  });
  EXPECT_TRUE(outcomes[0].ok());
  EXPECT_FALSE(has_record(0));
}

TEST_F(FlightRecord, LeavesTheSignalAloneWithoutTheVariable) {
  const auto outcomes = run_processes(1, {}, [](int) {
    Reducer reducer(mesh_of({1, 1}));
    ::raise(SIGUSR1);
    return 0;
  });
  EXPECT_EQ(outcomes[0].signal, SIGUSR1);
}

TEST_F(FlightRecord, IsWrittenOnACall) {
  const std::filesystem::path own = folder_ / "asked" / "for";
  const auto outcomes = run_processes(2, {}, [&](int rank) {
    const StepCase step = some_step(kPair);
    const Mesh mesh = mesh_of(kPair);
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    register_all(reducer, step);
    run_step(reducer, step, rank);
    static_cast<void>(gathered(reducer, step));
    static_cast<void>(reducer.grad_norm());
    reducer.close();
    write_flight_record(mesh, own);
    mesh.world().barrier();
    return 0;
  });
  for (const RankOutcome& outcome : outcomes) ASSERT_TRUE(outcome.ok()) << outcome.error;
  std::ifstream file(own / "rank_1.json");
  const json one = json::parse(file);
  EXPECT_EQ(one.at("reason"), "call");
  std::map<std::string, int> kinds;
  double begin_s = 0;
  for (const json& operation : one.at("operations")) {
    ++kinds[operation.at("kind")];
    EXPECT_EQ(operation.at("state"), "done") << operation;
    EXPECT_GE(operation.at("end_s"), operation.at("begin_s"));
    if (operation.at("kind") == "shard_hop") {
      EXPECT_GE(operation.at("begin_s"), begin_s);  // of one thread
      begin_s = operation.at("begin_s");
      EXPECT_GT(operation.at("bytes"), 0);
    }
  }
  EXPECT_GT(kinds["shard_hop"], 2);
  EXPECT_EQ(kinds["pack"], kinds["shard_hop"]);
  EXPECT_EQ(kinds["word"], 2);
  EXPECT_EQ(kinds["gather"], 1);
  EXPECT_EQ(kinds["norm"], 1);
  EXPECT_EQ(kinds["replica_hop"], 0);
}

// FSDP2 models have no Reducer.
TEST_F(FlightRecord, OfAReplicaHookIsWrittenOnASignal) {
  const auto outcomes = run_processes(2, options(), [&](int rank) {
    const Mesh mesh = mesh_of({.replicate = 2, .shard = 1});
    RowReducer hook(mesh, {{.name = "row", .count = 4}});
    ::raise(SIGUSR1);
    const bool is_written = await_record(rank);
    mesh.world().barrier();
    return is_written ? 0 : 1;
  });
  for (const RankOutcome& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.error;
}

TEST_F(FlightRecord, OfAnEarlierRunGoes) {
  write("rank_0.json", "of an earlier run");
  write("rank_7.json", "of a larger one");
  const auto outcomes = run_processes(1, options(), [&](int) {
    const Mesh mesh = mesh_of({1, 1});
    const Reducer first(mesh);
    const bool is_there = has_record(0);
    write("rank_0.json", "of this one");
    const Reducer second(mesh);
    return !is_there && has_record(0) ? 0 : 1;
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].error;
  EXPECT_TRUE(has_record(7)) << "nobody knows whose that is";
}

// Written by hand: the records that a job's ranks leave when they are asked at different times.
json hand_written(int rank, double wall_s, const std::vector<int>& ranks, int words,
                  const std::string& last_state = "done", const std::string& error = "") {
  json one{
      {"format", "hsdp flight record"},
      {"version", 2},
      {"job", 1700000000123000000},
      {"rank", rank},
      {"size", 4},
      {"host", "here"},
      {"process", 1},
      {"engine", "host"},
      {"replicate", 1},
      {"shard", 2},
      {"reason", "signal"},
      {"error", error},
      {"steady_s", 0.0},
      {"wall_s", wall_s},
      {"waits", json::array()},
      {"sources",
       json::array(
           {{{"source", 0}, {"name", "net"}, {"replicate", 1}, {"shard", 2}, {"ranks", ranks}}})},
      {"operations", json::array()}};
  for (int n = 0; n < words; ++n) {
    one["operations"].push_back({{"number", n},
                                 {"source", 0},
                                 {"kind", "word"},
                                 {"step", n},
                                 {"state", n + 1 < words ? "done" : last_state},
                                 {"begin_s", n - wall_s},
                                 {"end_s", n - wall_s}});
  }
  return one;
}

TEST_F(FlightRecord, OfOtherMomentsBlamesNobody) {
  write("rank_0.json", hand_written(0, 2.5, {0, 1}, 3).dump());
  write("rank_1.json", hand_written(1, 6.5, {0, 1}, 7, "begun").dump());
  const CommandOutcome findings = check();  // ranks 2 and 3 have no Reducer
  EXPECT_EQ(findings.status, 0) << findings.output;
  EXPECT_THAT(findings.output, HasSubstr("no rank waited for another"));
}

TEST_F(FlightRecord, WithAnErrorIsNoCleanOne) {
  write("rank_0.json", hand_written(0, 9, {0, 1}, 3, "begun", "timeout").dump());
  write("rank_1.json", hand_written(1, 9, {0, 1}, 3, "begun", "timeout").dump());
  const CommandOutcome findings = check();
  EXPECT_EQ(findings.status, 1) << findings.output;
  EXPECT_THAT(findings.output, AllOf(HasSubstr("error on ranks 0, 1 of 4: timeout"),
                                     HasSubstr("every rank had come")));
}

TEST_F(FlightRecord, SaysWhatCannotBeWritten) {
  const auto outcomes = run_processes(1, {}, [&](int) {
    write("file", "");
    const Mesh mesh = mesh_of({1, 1});
    const auto error =
        caught<UsageError>([&] { write_flight_record(mesh, folder_ / "file" / "folder"); });
    return error && std::string(error->what())
                        .starts_with(
                            "flight record: expected a folder that exists or can be made, got ")
               ? 0
               : 1;
  });
  EXPECT_TRUE(outcomes[0].ok());
}

TEST_F(FlightRecord, AFolderThatCannotBeIsAnErrorOnAllRanks) {
  write("file", "");
  ProcessOptions wrong = options();
  wrong.before = [this](int rank) {
    if (rank == 1) ::setenv("HSDP_FLIGHT_DIR", (folder_ / "file").c_str(), 1);
  };
  const auto outcomes = run_processes(2, wrong, [](int rank) {
    const Mesh mesh = mesh_of(kPair);
    if (rank == 0) {
      return caught<StepAbortedError>([&] { Reducer reducer(mesh); }).has_value() ? 0 : 1;
    }
    return caught<UsageError>([&] { Reducer reducer(mesh); }).has_value() ? 0 : 1;
  });
  for (const RankOutcome& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.error;
}

// At any moment the file is whole.
TEST_F(FlightRecord, OfARankThatDiesWhileItWritesIsWholeOrNotThere) {
  for (int round = 0; round < 10; ++round) {
    ProcessRanks ranks(1, {}, [&](int) -> int {
      const Mesh mesh = mesh_of({1, 1});
      for (int i = 0;; ++i) {
        write_flight_record(mesh, folder_.path());
        if (i == 1) note("writes");
      }
    });
    ASSERT_TRUE(ranks.wait_for_note(0, "writes"));
    std::this_thread::sleep_for(std::chrono::microseconds(731 * round));
    ranks.signal(0, SIGKILL);
    EXPECT_EQ(ranks.finish()[0].signal, SIGKILL);
    EXPECT_EQ(record(0).at("rank"), 0);
    const CommandOutcome findings = check();  // a temporary file beside it is ignored
    EXPECT_EQ(findings.status, 0) << findings.output;
    EXPECT_THAT(findings.output, HasSubstr("flight records of 1 of 1 ranks of the job "));
  }
}

json empty_record(int rank, int size) {
  return {
      {"format", "hsdp flight record"},
      {"version", 2},
      {"job", 1700000000123000000},
      {"rank", rank},
      {"size", size},
      {"host", "node"},
      {"error", ""},
      {"steady_s", 100.0},
      {"wall_s", 1100.0},
      {"sources", {{{"source", 0}, {"name", "reducer"}, {"shard", 2}, {"ranks", {0, 1, 2, 3}}}}},
      {"operations", json::array()}};
}

json operation(int number, const std::string& kind, int step, const std::string& state,
               double begin_s) {
  return {{"number", number}, {"source", 0},    {"kind", kind},
          {"step", step},     {"state", state}, {"begin_s", begin_s}};
}

TEST_F(FlightRecord, RefusesWhatIsNone) {
  const auto refuses = [&](const std::string& text, const std::string& why) {
    write("rank_0.json", text);
    const CommandOutcome findings = check();
    EXPECT_EQ(findings.status, 2) << findings.output;
    EXPECT_THAT(findings.output,
                AllOf(HasSubstr("hsdp_check: cannot tell: flight record: "),
                      HasSubstr("rank_0.json: expected the record of a rank, got " + why)));
  };
  const json whole = empty_record(0, 2);
  refuses(whole.dump().substr(0, 60), "text that is no JSON, or ends early");
  refuses("", "text that is no JSON, or ends early");
  refuses("[1]", "JSON of another kind");
  refuses(R"({"format": "torch"})", "JSON of another kind");
  json other = whole;
  other["version"] = 1;  // of an earlier build
  refuses(other.dump(), "version 1, which this hsdp_check does not know");
  other = whole;
  other.erase("operations");
  refuses(other.dump(), "one that lacks something (");
  other = whole;
  other["sources"][0]["shard"] = 0;
  refuses(other.dump(), "one that lacks something (a shard of 0)");
  refuses(empty_record(1, 2).dump(), "one of rank 1 of 2");
  refuses(empty_record(0, 0).dump(), "one of ");
  other = whole;
  other["job"] = "today";
  refuses(other.dump(), "one that lacks something (");
}

// Ranks that wrote a record in an earlier job only count as without one.
TEST_F(FlightRecord, ReadsTheNewestJob) {
  json older = empty_record(1, 4);
  older["job"] = 1600000000000000000;
  older["error"] = "of the earlier job";
  write("rank_0.json", empty_record(0, 4).dump());
  write("rank_1.json", older.dump());
  write("rank_2.json", empty_record(2, 4).dump());
  const CommandOutcome findings = check();
  EXPECT_EQ(findings.status, 1);
  EXPECT_THAT(findings.output,
              testing::StartsWith(
                  "flight records of 2 of 4 ranks of the job that began at "
                  "2023-11-14T22:13:20.123Z\n"
                  "rank 1 of 4 left only a record of an earlier job, of 2020-09-13T12:26:40.000Z\n"
                  "ranks 1, 3 of 4 left no record\n"));
  EXPECT_THAT(findings.output, testing::Not(HasSubstr("of the earlier job\n")));
}

// Through all its meshes, of all or some ranks, and through all its worlds; the next job has
// another name.
TEST_F(FlightRecord, NamesItsJob) {
  std::vector<std::int64_t> jobs;
  for (int run = 0; run < 2; ++run) {
    const auto outcomes = run_processes(4, {}, [&](int rank) {
      {
        Mesh closed = mesh_of(kSquare);
        write_flight_record(closed, folder_ / "closed");
        closed.close();
      }
      const Mesh first = mesh_of(kSquare);
      write_flight_record(first, folder_ / "first");
      const int row = rank / 2;
      const Mesh half = init_mesh({.replicate = 1, .shard = 2, .ranks = {{2 * row, 2 * row + 1}}});
      write_flight_record(half, folder_ / "half");
      half.world().barrier();
      return 0;
    });
    for (const RankOutcome& outcome : outcomes) ASSERT_TRUE(outcome.ok()) << outcome.error;
    for (int rank = 0; rank < 4; ++rank) {
      for (const char* const folder : {"closed", "first", "half"}) {
        std::ifstream file(folder_ / folder / ("rank_" + std::to_string(rank) + ".json"));
        jobs.push_back(json::parse(file).at("job"));
      }
    }
  }
  EXPECT_THAT(std::vector(jobs.begin(), jobs.begin() + 12), testing::Each(jobs.front()));
  EXPECT_THAT(std::vector(jobs.begin() + 12, jobs.end()), testing::Each(jobs.back()));
  EXPECT_LT(jobs.front(), jobs.back());
}

TEST_F(FlightRecord, RefusesAFolderWithoutOne) {
  const CommandOutcome empty = check();
  EXPECT_EQ(empty.status, 2);
  EXPECT_THAT(empty.output,
              HasSubstr("expected a folder with files rank_N.json, got none; start the "
                        "job with HSDP_FLIGHT_DIR"));
}

// A 2 x 2 mesh; seconds of a clock that started with the host.
TEST_F(FlightRecord, FollowsTheChainOfWaitsToItsEnd) {
  json records[4];
  for (int rank = 0; rank < 4; ++rank) {
    json& one = records[rank] = empty_record(rank, 4);
    one["operations"].push_back(operation(0, "word", 4, "done", 90));
    if (rank != 3) one["operations"].push_back(operation(1, "shard_hop", 5, "done", 91));
    if (rank < 2) one["operations"].push_back(operation(2, "replica_hop", 5, "begun", 92));
  }
  records[2]["operations"][1]["state"] = "begun";
  records[3]["operations"].push_back(operation(1, "pack", 5, "begun", 90.5));
  for (int rank = 0; rank < 4; ++rank) {
    write("rank_" + std::to_string(rank) + ".json", records[rank].dump());
  }
  const CommandOutcome findings = check();
  EXPECT_EQ(findings.status, 1);
  EXPECT_EQ(findings.output,
            "flight records of 4 of 4 ranks of the job that began at 2023-11-14T22:13:20.123Z\n"
            "shard_hop, step 5 (reducer): rank 2 of 4 waited in it for 9.00 s\n"
            "    had not come: rank 3 of 4\n"
            "replica_hop, step 5 (reducer): ranks 0, 1 of 4 waited in it for 8.00 s\n"
            "    had not come: ranks 2, 3 of 4\n"
            "the others waited for rank 3 of 4\n"
            "    rank 3 of 4 on node did last: pack, step 5 (reducer), begun, begun 9.50 s before "
            "its record\n"
            "the last operation that all ranks completed: word, step 4 (reducer)\n");
}

TEST_F(FlightRecord, OfARankFarAheadDoesNotMissWhatItForgot) {
  for (int rank = 0; rank < 2; ++rank) {
    json one = empty_record(rank, 2);
    one["sources"][0]["ranks"] = {0, 1};
    if (rank == 0) one["operations"].push_back(operation(0, "word", 1, "begun", 50));
    if (rank == 1) one["operations"].push_back(operation(2000, "word", 9, "done", 60));
    write("rank_" + std::to_string(rank) + ".json", one.dump());
  }
  const CommandOutcome findings = check();
  EXPECT_EQ(findings.status, 0);
  EXPECT_THAT(findings.output, HasSubstr("no rank waited for another\n"));
  EXPECT_THAT(findings.output, HasSubstr("no operation that all ranks completed"));
}

}  // namespace
}  // namespace hsdp
