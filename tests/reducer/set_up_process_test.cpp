// A set-up fails on one of several processes: then no rank has it, nothing of it is left, and the
// next attempt succeeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/failed_set_up.h"
#include "tests/support/process_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;

// What this process has open now.
struct Held {
  std::ptrdiff_t thread_count = 0;
  std::ptrdiff_t descriptor_count = 0;
  bool operator==(const Held&) const = default;
};

void PrintTo(const Held& held, std::ostream* out) {
  *out << held.thread_count << " threads, " << held.descriptor_count << " descriptors";
}

Held held_now() {
  const auto entry_count = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  };
  return {entry_count("/proc/self/task"), entry_count("/proc/self/fd")};
}

// What it has open once that no longer changes: the I/O thread closes the sockets of the connection
// phase a moment later.
Held held_at_rest() {
  Held held = held_now();
  for (int calm_looks = 0; calm_looks < 20; ++calm_looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Held now = held_now();
    if (now != held) calm_looks = 0;
    held = now;
  }
  return held;
}

// A joined thread stays in the list for a moment.
void expect_no_more_than(const Held& before, const std::string& label) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  Held held = held_now();
  const auto has_more = [&] {
    return held.thread_count > before.thread_count ||
           held.descriptor_count > before.descriptor_count;
  };
  while (has_more() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    held = held_now();
  }
  EXPECT_FALSE(has_more()) << label << ": " << testing::PrintToString(held) << ", before "
                           << testing::PrintToString(before);
}

// Runs `body` in 2 x 2 processes. The timeout is long, as no rank may learn of a peer's failure
// from it.
void run_patient_processes(const std::string& transport, const MeshBody& body) {
  ProcessOptions options;
  options.deadline = std::chrono::seconds(90);
  options.environment["HSDP_TRANSPORT"] = transport;
  const auto outcomes = run_processes(kSquare.size(), options, [&](int) {
    const Mesh mesh =
        init_mesh({.replicate = kSquare.replicate, .shard = kSquare.shard, .timeout_s = 60.0});
    body(mesh);
    mesh.world().barrier();
    return testing::Test::HasFailure() ? 1 : 0;
  });
  for (const RankOutcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok()) << outcome.exit_code << " " << outcome.error;
  }
}

StepCase small_step() {
  return random_step({{.name = "w0", .shape = {100}}, {.name = "w1", .shape = {9, 7}}},
                     kSquare.size(), {Sync::kShard, Sync::kAll}, 3);
}

// Runs a whole step; returns the bits of its result.
void expect_right_step(Reducer& reducer, const StepCase& step, const Mesh& mesh) {
  run_step(reducer, step, mesh.rank());
  expect_same_bits(gathered(reducer, step), reference_results(step, {}, kSquare), "the step");
}

ReducerOptions options_with_memory() {
  return {.bucket_bytes = 256, .replica_hop = std::make_shared<MemoryHop>()};
}

// Where processes share memory, each also maps its peers' memory.
std::vector<SetUpFault> faults_over(const std::string& transport) {
  std::vector<SetUpFault> faults = set_up_faults();
  if (transport == "tcp") return faults;
  for (SetUpFault& fault : faults) {
    if (fault.part == "prepare its replica hop") fault.skipped = 2;
  }
  faults.push_back({"allocate its carry", FailingCall::kMadvise, 1});
  faults.push_back({"allocate its staging buckets", FailingCall::kMadvise, 4});
  faults.push_back({"allocate its staging buckets", FailingCall::kMadvise, 6});
  return faults;
}

class SetUpOfProcesses : public testing::TestWithParam<std::string> {};

// A Reducer whose set-up never succeeds leaves nothing behind either when it is destroyed.
TEST_P(SetUpOfProcesses, FailsOnAllRanksLeavesNothingAndMayBeTriedAgain) {
  const StepCase step = small_step();
  run_patient_processes(GetParam(), [&](const Mesh& mesh) {
    const Held outside = held_at_rest();
    int bad = 0;
    for (const SetUpFault& fault : faults_over(GetParam())) {
      for (const bool succeeds : {true, false}) {
        {
          Reducer reducer(mesh, options_with_memory());
          register_all(reducer, step);
          const Held before = held_at_rest();
          for (int attempt = 0; attempt < 3; ++attempt) {
            bad = (bad + 1) % mesh.size();
            expect_failed_set_up(reducer, mesh, fault, bad);
            expect_no_more_than(before, fault.part);
          }
          if (succeeds) expect_right_step(reducer, step, mesh);
        }
        static_cast<void>(Communicator(mesh.world()).exchange("", "test"));
        expect_no_more_than(outside, "a Reducer that is gone");
      }
    }
  });
}

TEST_P(SetUpOfProcesses, ComparesRegistrationsThatMayBeMended) {
  const StepCase step = small_step();
  run_patient_processes(GetParam(), [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 256});
    reducer.register_parameter(step.parameters[0]);
    if (mesh.rank() != 2) reducer.register_parameter(step.parameters[1]);
    const Held before = held_at_rest();
    for (int attempt = 0; attempt < 3; ++attempt) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THAT(caught<MismatchError>([&] { reducer.begin_microbatch(); }),
                  names({2}, AllOf(HasSubstr("parameter 1"), HasSubstr("'w1'"),
                                   HasSubstr("nothing more on rank 2 of 4"))));
      EXPECT_LT(std::chrono::steady_clock::now() - start, within_two_seconds());
      expect_no_more_than(before, "registrations");
    }
    if (mesh.rank() == 2) reducer.register_parameter(step.parameters[1]);
    expect_right_step(reducer, step, mesh);
  });
}

// One constructor after another fails, in the options or in the groups.
TEST_P(SetUpOfProcesses, LeavesTheMeshToAnotherReducer) {
  const StepCase step = small_step();
  const bool has_shared_groups = GetParam() != "tcp";
  run_patient_processes(GetParam(), [&](const Mesh& mesh) {
    const auto make = [&](std::int64_t bucket_bytes) {
      Reducer(mesh, {.bucket_bytes = bucket_bytes});
    };
    const Held before = held_at_rest();
    for (int bad = 0; bad < mesh.size(); ++bad) {
      const bool own = mesh.rank() == bad;
      EXPECT_THAT(caught<Error>([&] { make(own ? -1 : 256); }),
                  says(HasSubstr(own ? "bucket_bytes of at least 1"
                                     : "rank " + std::to_string(bad) + " of 4 could")));
      expect_no_more_than(before, "options");
      const std::vector<SetUpFault> faults{
          {"make its shard group", FailingCall::kMemfdCreate, 0},
          {"make its replicate group", FailingCall::kMemfdCreate, 1},
          {"make its shard group", FailingCall::kMadvise, 2},
          {"make its replicate group", FailingCall::kMadvise, 5},
      };
      for (const SetUpFault& fault : faults) {
        if (!has_shared_groups) break;
        if (own) fail_call(fault.call, fault.skipped);
        EXPECT_THAT(caught<Error>([&] { make(256); }),
                    says(HasSubstr(own ? "host memory" : fault.part)));
        EXPECT_EQ(call_has_failed(), own);
        expect_no_more_than(before, fault.part);
      }
    }
    Reducer reducer(mesh, {.bucket_bytes = 256});
    register_all(reducer, step);
    expect_right_step(reducer, step, mesh);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, SetUpOfProcesses, testing::Values("auto", "tcp"),
                         [](const auto& chosen) {
                           return chosen.param == "tcp" ? "Tcp" : "SharedMemory";
                         });

}  // namespace
}  // namespace hsdp
