// The shim over libnccl names the rule of NCCL that a program breaks, and finds nothing wrong in
// what the library does. The stand-in for libnccl lies under it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "file_control.h"
#include "hsdp/comm/nccl/nccl_library.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/error.h"
#include "nccl_checks.h"
#include "nccl_pair.h"
#include "nccl_ranks.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/temporary_directory.h"

namespace hsdp::test {
namespace {

using comm::NcclError;
using comm::NcclHandle;
using comm::NcclLibrary;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Lines = std::vector<std::string>;

// The engine opens the shim, and the shim opens the stand-in. It reads its environment once, so all
// tests share a folder of traces; a death test's process inherits it.
std::filesystem::path use_shim() {
  static_cast<void>(nccl_stand_in());
  ::setenv("HSDP_NCCL_LIBRARY", HSDP_NCCL_SHIM, 1);
  ::setenv("HSDP_NCCL_SHIM_OVER", HSDP_NCCL_STAND_IN, 1);
  if (std::getenv("HSDP_NCCL_SHIM_TRACE") == nullptr) {
    static const TemporaryDirectory folder;
    ::setenv("HSDP_NCCL_SHIM_TRACE", folder.path().c_str(), 1);
  }
  return std::getenv("HSDP_NCCL_SHIM_TRACE");
}

// The lines that this process writes to the trace while the object lives.
class NewLines {
 public:
  NewLines() : folder_(use_shim()), earlier_(all().size()) {}

  [[nodiscard]] Lines lines() const {
    Lines lines = all();
    lines.erase(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(earlier_));
    return lines;
  }
  [[nodiscard]] Lines findings() const {
    Lines found = lines();
    std::erase_if(found, [](const std::string& line) {
      return line.find(R"("kind": "call")") != std::string::npos;
    });
    return found;
  }

 private:
  [[nodiscard]] Lines all() const {
    Lines lines;
    const std::string end = "-" + std::to_string(::getpid()) + ".jsonl";
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (!entry.path().string().ends_with(end)) continue;
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) lines.push_back(line);
    }
    return lines;
  }

  std::filesystem::path folder_;
  std::size_t earlier_;
};

struct Verdict {
  int status = -1;
  std::string output;
};

// What nccl_trace.py reports about the lines.
Verdict compare(const Lines& lines) {
  const TemporaryDirectory folder;
  {
    std::ofstream file(folder / "ranks.jsonl");
    for (const std::string& line : lines) file << line << '\n';
  }
  const std::string command = std::string(HSDP_NCCL_TRACE) + " " + folder.path().string();
  Verdict verdict;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  std::array<char, 512> part{};
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) verdict.output += part.data();
  verdict.status = WEXITSTATUS(::pclose(pipe));
  return verdict;
}

auto is_finding(const std::string& kind, const std::string& rule, const std::string& text) {
  return AllOf(HasSubstr(R"("kind": ")" + kind + R"(", "rule": ")" + rule + '"'), HasSubstr(text));
}

// The shim is in use before the pair begins, and what it has written until then is known.
struct Traced {
  NewLines trace_;
};

class NcclShim : protected Traced, public NcclPair {
 protected:
  // Rank 0 to rank 1, not settled.
  void send(std::size_t bytes = kBytes, int device = 0) {
    cudaSetDevice(device);
    group([&] { library_->send(first().sent, bytes, 1, first().comm, first().stream); });
  }
  void receive(std::size_t bytes = kBytes) {
    cudaSetDevice(1);
    group([&] { library_->receive(second().received, bytes, 0, second().comm, second().stream); });
  }
  void send_and_receive(std::size_t received_bytes = kBytes) {
    send();
    settle(first().comm);
    receive(received_bytes);
    settle(second().comm);
  }
  void gather() {
    for (int device : {0, 1}) {
      Rank& rank = ranks_[static_cast<std::size_t>(device)];
      cudaSetDevice(device);
      group(
          [&] { library_->all_gather(rank.sent, rank.received, kBytes, rank.comm, rank.stream); });
      settle(rank.comm);
    }
  }
  void enroll(Rank& rank, void* memory, std::size_t bytes) {
    cudaSetDevice(&rank == &first() ? 0 : 1);
    static_cast<void>(library_->enroll(rank.comm, memory, bytes));
  }
};

TEST_F(NcclShim, FindsNothingWhereEveryRuleIsKept) {
  send_and_receive();
  gather();
  cudaStreamSynchronize(second().stream);
  EXPECT_THAT(trace_.findings(), IsEmpty());
  const Verdict verdict = compare(trace_.lines());
  EXPECT_EQ(verdict.output, "trace: 2 ranks, 6 calls, 0 violations\n");
  EXPECT_EQ(verdict.status, 0);
}

TEST_F(NcclShim, ACallOnACommunicatorThatIsNotSettled) {
  send();
  EXPECT_THROW(send(), NcclError);
  EXPECT_THAT(trace_.findings(), ElementsAre(is_finding("violation", "in_progress", "send on")));
}

TEST_F(NcclShim, ManagingACommunicatorThatIsNotSettled) {
  send();
  EXPECT_THROW(library_->begin_finalize(first().comm), NcclError);
  EXPECT_THAT(trace_.findings(),
              ElementsAre(is_finding("violation", "in_progress", "ncclCommFinalize on")));
}

TEST_F(NcclShim, LaunchesThatRace) {
  NcclHandle const other = alone();
  const auto race = [&] {
    send();
    group([&] { library_->broadcast(first().received, kBytes, 0, other, first().stream); });
  };
  race();
  settle(first().comm);
  settle(other);
  EXPECT_THAT(trace_.findings(), ElementsAre(is_finding("note", "launch_race", "on device 0")));
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
  EXPECT_THROW(race(), NcclError);
  EXPECT_THAT(trace_.findings(),
              ElementsAre(::testing::_, is_finding("violation", "launch_race", "forbids that")));
  expected_races_ = 1;
  library_->abort(std::exchange(first().comm, nullptr));  // its kernel is before the other's
  library_->abort(other);
}

TEST_F(NcclShim, LaunchesOfTwoDevicesDoNotRace) {
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
  send();
  receive();
  EXPECT_THAT(trace_.findings(), IsEmpty());
}

TEST_F(NcclShim, AnotherDeviceThatIsCurrent) {
  send(kBytes, 1);
  EXPECT_THAT(trace_.findings(), ElementsAre(is_finding("violation", "device",
                                                        "of device 0 while device 1 is current")));
}

TEST_F(NcclShim, AStreamOfAnotherDevice) {
  cudaSetDevice(0);
  const auto send_on_other = [&] {
    group([&] { library_->send(first().sent, kBytes, 1, first().comm, second().stream); });
  };
  EXPECT_THROW(send_on_other(), NcclError);
  EXPECT_THAT(trace_.findings(), ElementsAre(is_finding("violation", "stream_device",
                                                        "device 0 with a stream of device 1")));
}

TEST_F(NcclShim, AStreamThatIsBeingCaptured) {
  cudaSetDevice(0);
  cudaStreamBeginCapture(first().stream, cudaStreamCaptureModeRelaxed);
  send();
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(first().stream, &graph);
  EXPECT_THAT(trace_.findings(), ElementsAre(is_finding("violation", "stream_capture", "send on")));
}

TEST_F(NcclShim, ACollectiveAfterAReportedError) {
  nccl_stand_in().set_error(0, 6);
  EXPECT_TRUE(library_->status(first().comm).failed());
  EXPECT_THAT(trace_.findings(), IsEmpty());
  send();
  EXPECT_THAT(trace_.findings(), ElementsAre(is_finding("violation", "use_after_failure",
                                                        "GetAsyncError gave error 6")));
}

TEST_F(NcclShim, ACollectiveAfterACallThatFailed) {
  cudaSetDevice(0);
  EXPECT_THROW(
      group([&] { library_->send(first().sent, kBytes, 1, first().comm, second().stream); }),
      NcclError);
  settle(first().comm);
  send();
  EXPECT_THAT(trace_.findings(),
              ElementsAre(is_finding("violation", "stream_device", ""),
                          is_finding("violation", "use_after_failure", "ncclGroupEnd returned")));
}

TEST_F(NcclShim, ACollectiveAfterARevocation) {
  library_->revoke(first().comm);
  send();
  EXPECT_THAT(trace_.findings(),
              ElementsAre(is_finding("violation", "use_after_failure", "ncclCommRevoke")));
}

TEST_F(NcclShim, MemoryOfAMessageThatOneSideRegistered) {
  for (Rank* const only : {&first(), &second()}) {
    NewLines trace;
    library_ = NcclLibrary::open();
    void* const memory = only == &first() ? only->sent : only->received;
    enroll(*only, memory, kBytes);
    send_and_receive();
    const Verdict verdict = compare(trace.lines());
    const std::string where =
        only == &first() ? "rank 0 and not on rank 1" : "rank 1 and not on rank 0";
    EXPECT_THAT(verdict.output, AllOf(HasSubstr("violation: registration: "),
                                      HasSubstr("of 64 bytes: memory is registered on " + where),
                                      HasSubstr(" 1 violations\n")));
    EXPECT_EQ(verdict.status, 1);
    connect();
  }
}

TEST_F(NcclShim, MemoryOfACollectiveThatOneRankRegistered) {
  enroll(second(), second().received, 2 * kBytes);
  gather();
  const Verdict verdict = compare(trace_.lines());
  EXPECT_THAT(verdict.output,
              AllOf(HasSubstr("violation: registration: "),
                    HasSubstr("written memory is registered on rank 1 and not on rank 0"),
                    HasSubstr(" 1 violations\n")));
  EXPECT_EQ(verdict.status, 1);
}

TEST_F(NcclShim, MemoryThatAllRegistered) {
  for (Rank& rank : ranks_) {
    enroll(rank, rank.sent, kBytes);
    enroll(rank, rank.received, 2 * kBytes);
  }
  gather();
  send_and_receive();
  EXPECT_EQ(compare(trace_.lines()).output, "trace: 2 ranks, 10 calls, 0 violations\n");
}

// Only part of the memory that a call writes is registered.
TEST_F(NcclShim, MemoryThatIsRegisteredInPartIsNotRegistered) {
  enroll(first(), first().received, 2 * kBytes);
  enroll(second(), second().received, kBytes);
  gather();
  EXPECT_THAT(compare(trace_.lines()).output, HasSubstr("violation: registration: "));
}

TEST_F(NcclShim, MemoryThatIsRegisteredNoMore) {
  enroll(first(), first().sent, kBytes);
  cudaSetDevice(0);
  library_->withdraw(first().comm, first().sent);
  send_and_receive();
  EXPECT_EQ(compare(trace_.lines()).output, "trace: 2 ranks, 6 calls, 0 violations\n");
}

// NCCL refuses to destroy it, so it is still there.
TEST_F(NcclShim, DestroyingACommunicatorThatIsNotSettled) {
  send();
  library_->destroy(first().comm);
  settle(first().comm);
  send();
  EXPECT_THAT(trace_.findings(),
              ElementsAre(is_finding("violation", "in_progress", "ncclCommDestroy on")));
}

TEST_F(NcclShim, ACommunicatorThatIsNotSettledMayBeAborted) {
  send();
  library_->abort(std::exchange(first().comm, nullptr));
  EXPECT_THAT(trace_.findings(), IsEmpty());
}

TEST_F(NcclShim, AMessageOfAnotherSize) {
  send_and_receive(kBytes / 2);
  const Verdict verdict = compare(trace_.lines());
  EXPECT_THAT(verdict.output,
              AllOf(HasSubstr("violation: match: "), HasSubstr("64 bytes are sent, 32 received")));
  EXPECT_EQ(verdict.status, 1);
}

using NcclShimDeathTest = NcclShim;

TEST_F(NcclShimDeathTest, ACommunicatorThatHasEnded) {
  EXPECT_DEATH(
      {
        library_->abort(first().comm);
        static_cast<void>(library_->status(first().comm));
      },
      "nccl shim: violation: use_after_end: ncclCommGetAsyncError on communicator .* of rank 0, "
      "which was destroyed or aborted");
}

TEST_F(NcclShimDeathTest, ACommunicatorThatNeverEnds) {
  EXPECT_EXIT(
      {
        library_->abort(first().comm);
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "nccl shim: note: never_ended: communicator .* of rank 1");
}

TEST_F(NcclShimDeathTest, AViolationEndsTheProcessWhereThatIsWanted) {
  EXPECT_EXIT(
      {
        send(kBytes, 1);
        ::setenv("HSDP_NCCL_SHIM_FATAL", "1", 1);
        settle(first().comm);
        send(kBytes, 1);
      },
      ::testing::KilledBySignal(SIGABRT), "nccl shim: violation: device: send on");
}

TEST(NcclShimTraceDeathTest, AFolderThatIsNotThereIsNamedAndTheProgramGoesOn) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        static_cast<void>(use_shim());
        ::setenv("HSDP_NCCL_SHIM_TRACE", "/nowhere", 1);
        const auto library = NcclLibrary::open();
        library->abort(library->begin_init(1, library->new_id(), 0));
        std::exit(0);
      },
      ::testing::ExitedWithCode(0),
      "nccl shim: HSDP_NCCL_SHIM_TRACE: expected a folder to write to, got '/nowhere'");
}

// Opens the shim over that file; exits with 3 if the engine refuses it.
void open_over(const char* file) {
  static_cast<void>(use_shim());
  if (file == nullptr) {
    ::unsetenv("HSDP_NCCL_SHIM_OVER");
  } else {
    ::setenv("HSDP_NCCL_SHIM_OVER", file, 1);
  }
  try {
    static_cast<void>(NcclLibrary::open());
  } catch (const UsageError&) {
    std::exit(3);
  }
}

TEST(NcclShimOverDeathTest, NothingThatItCouldUse) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const std::string expected =
      "nccl shim: HSDP_NCCL_SHIM_OVER: expected the path of a libnccl.so.2, ";
  const auto refused = ::testing::ExitedWithCode(3);
  EXPECT_EXIT(open_over(nullptr), refused, expected + "2.19 or newer, got nothing");
  EXPECT_EXIT(open_over("/nowhere/libnccl.so.2"), refused,
              "got '/nowhere/libnccl.so.2' \\(/nowhere");
  EXPECT_EXIT(open_over(HSDP_NCCL_SHIM), refused, "that is the shim");
  EXPECT_EXIT(open_over(HSDP_NCCL_BARE), refused, "has no ncclCommRegister");
}

void expect_clean(const NewLines& trace, const std::string& ranks) {
  EXPECT_THAT(trace.findings(), IsEmpty());
  const Verdict verdict = compare(trace.lines());
  EXPECT_THAT(verdict.output, AllOf(HasSubstr("trace: " + ranks + " ranks, "),
                                    HasSubstr(" calls, 0 violations\n")));
  EXPECT_EQ(verdict.status, 0);
}

// Reducers and every collective, as a GPU checks them, with the Control that ranks have there.
// Launches must not race either.
class NcclShimOverChecks : public ::testing::TestWithParam<MeshShape> {};

TEST_P(NcclShimOverChecks, FindsNothing) {
  const MeshShape shape = GetParam();
  const NewLines trace;
  const LaunchOrderCounts counts;
  nccl_stand_in().reset();
  const TemporaryDirectory folder;
  run_each(static_cast<std::size_t>(shape.size()), [&](std::size_t r) {
    const int rank = static_cast<int>(r);
    const auto control = std::make_shared<gpu::FileControl>(folder / "control", rank, shape.size(),
                                                            std::chrono::milliseconds(60'000));
    Communicator world = comm::nccl_world(control, gpu_of(rank));
    gpu::check_nccl_engine(world, shape.replicate, shape.shard, gpu_of(rank));
  });
  expect_no_race();
  expect_clean(trace, std::to_string(shape.size()));
}

INSTANTIATE_TEST_SUITE_P(Meshes, NcclShimOverChecks,
                         ::testing::Values(MeshShape{1, 2}, MeshShape{2, 1}, kSquare),
                         ::testing::PrintToStringParamName());

// All ranks take back their registrations.
TEST(NcclShimOverEngine, FindsNothingWhereARankCannotRegister) {
  const NewLines trace;
  run_nccl_ranks(3, [](Communicator& world) {
    const SharedMemory before = world.allocate(12, Dtype::kF32);
    if (world.rank() == 1) refuse_registration(1);
    static_cast<void>(world.exchange("", "refuse"));
    const SharedMemory after = world.allocate(12, Dtype::kF32);
    world.all_reduce(before.view());
    world.all_reduce(after.view());
  });
  EXPECT_EQ(nccl_stand_in().enrolled(), 0);
  EXPECT_THAT(trace.lines(), ::testing::Contains(HasSubstr("ncclCommDeregister")));
  expect_clean(trace, "3");
}

// What a failing world does, too. The ranks are cut off at different places.
TEST(NcclShimOverEngine, FindsNothingWhereTheWorldFails) {
  const NewLines trace;
  const auto errors = try_nccl_ranks(2, [](Communicator& world) {
    const SharedMemory data = world.allocate(12, Dtype::kF32);
    world.all_reduce(data.view());
    if (world.rank() == 1) nccl_stand_in().set_error(1, 3);
    for (;;) world.all_reduce(data.view());
  });
  for (const std::exception_ptr& error : errors) EXPECT_NE(error, nullptr);
  const auto are_aborted = [&trace] {  // by threads for which no rank waits
    return std::ranges::count_if(trace.lines(), [](const std::string& line) {
             return line.find("ncclCommAbort") != std::string::npos;
           }) == 2;
  };
  EXPECT_TRUE(soon(are_aborted));
  expect_clean(trace, "2");
}

}  // namespace
}  // namespace hsdp::test
