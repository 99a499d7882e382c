// A process that is stopped while its peers send to it over TCP is late, not lost: its full window
// must not end the connection before the world's timeout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <memory>

#include "hsdp/comm/world.h"
#include "hsdp/error.h"
#include "tests/support/process_ranks.h"

namespace hsdp::test {
namespace {

using testing::HasSubstr;

// Longer than the 30 s after which TCP, if configured so, gives up on a peer whose window stays
// closed.
constexpr std::chrono::seconds kTimeout{40};
constexpr int kStopped = 1;
// From each rank to each other: more than the kernel's buffers at both ends hold.
constexpr std::int64_t kCount = std::int64_t{64} << 20;

void stop_here(int /*signal*/) { ::kill(::getpid(), SIGSTOP); }

// Memory that stops the process when it is read. By then the ranks have agreed on the call, and the
// other ranks' rows are under way.
float* memory_that_stops() {
  std::signal(SIGSEGV, stop_here);
  void* const memory = ::mmap(nullptr, static_cast<std::size_t>(kCount) * sizeof(float), PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<float*>(memory);
}

float* zeros() {
  return static_cast<float*>(std::calloc(static_cast<std::size_t>(kCount), sizeof(float)));
}

TEST(StoppedTcpPeer, IsLateAndNotLost) {
  ProcessRanks ranks(3, {.deadline = kTimeout + std::chrono::seconds(60)}, [](int rank) {
    Communicator world =
        connect_world({.engine = "host", .timeout = kTimeout, .transport = TransportChoice::kTcp});
    float* const data = rank == kStopped ? memory_that_stops() : zeros();
    if (data == nullptr) return 1;
    try {
      world.all_reduce({.data = {data, kCount}, .wire = Dtype::kBf16, .bucket = 3});
    } catch (const TimeoutError& error) {
      note(error.what());
      return error.ranks() == std::vector<int>{kStopped} ? 0 : 2;
    }
    return 3;
  });
  ASSERT_TRUE(ranks.wait_until_stopped(kStopped));
  for (const int rank : {0, 2}) EXPECT_TRUE(ranks.wait_for_end(rank));
  ranks.signal(kStopped, SIGKILL);
  const auto outcomes = ranks.finish();
  for (const int rank : {0, 2}) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(outcome.ok()) << outcome.exit_code << ": " << outcome.error;
    ASSERT_EQ(outcome.notes.size(), 1U);
    // Either its silence or a wait for it reaches the timeout first.
    EXPECT_THAT(outcome.notes[0],
                testing::AllOf(HasSubstr("all_reduce of bucket 3"), HasSubstr("rank 1 of 3"),
                               HasSubstr("is stopped or unreachable")));
  }
}

}  // namespace
}  // namespace hsdp::test
