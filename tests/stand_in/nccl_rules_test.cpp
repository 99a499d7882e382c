// What the stand-in for libnccl refuses and punishes, each with where the real one does so: source
// files of NCCL 2.28.9, or its User Guide (UG).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "cuda_stand_in.h"
#include "nccl_pair.h"
#include "nccl_ranks.h"

namespace hsdp::test {
namespace {

using comm::NcclError;
using comm::NcclHandle;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class NcclRules : public NcclPair {
 protected:
  // Rank 0 to rank 1, of which only the sender is settled.
  void send_one() {
    group([&] { library_->send(first().sent, kBytes, 1, first().comm, first().stream); });
    settle(first().comm);
    group([&] { library_->receive(second().received, kBytes, 0, second().comm, second().stream); });
  }
  [[nodiscard]] bool is_done(const Rank& rank) const {
    cudaEvent_t event = nullptr;
    int device = 0;
    cudaGetDevice(&device);
    cudaSetDevice(rank.comm == ranks_[0].comm ? 0 : 1);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, rank.stream);
    bool done = false;
    for (int i = 0; i < 200 && !done; ++i) {
      done = cudaEventQuery(event) == cudaSuccess;
      ::usleep(500);
    }
    cudaEventDestroy(event);
    cudaSetDevice(device);
    return done;
  }
  [[nodiscard]] int received_byte() {
    return static_cast<const unsigned char*>(second().received)[kBytes - 1];
  }
};

TEST_F(NcclRules, MovesBytes) {
  send_one();
  settle();
  EXPECT_TRUE(is_done(second()));
  EXPECT_EQ(received_byte(), 1);
}

// enqueue.cc, addP2pToPlan: "We require users registering buffers on both sides".
TEST_F(NcclRules, MemoryThatOneSideRegisteredHangs) {
  for (Rank* const only : {&first(), &second()}) {
    void* const memory = only == &first() ? only->sent : only->received;
    void* const enrolled = library_->enroll(only->comm, memory, kBytes);
    send_one();
    settle();
    EXPECT_FALSE(is_done(second()));
    EXPECT_FALSE(is_done(first()));
    library_->withdraw(only->comm, enrolled);
    for (Rank& rank : ranks_) library_->abort(std::exchange(rank.comm, nullptr));
    id_ = library_->new_id();  // each is for one communicator
    for (int rank : {0, 1}) {
      cudaSetDevice(rank);
      ranks_[static_cast<std::size_t>(rank)].comm = library_->begin_init(2, id_, rank);
    }
    settle();
  }
}

TEST_F(NcclRules, MemoryThatBothRegisteredMoves) {
  static_cast<void>(library_->enroll(first().comm, first().sent, kBytes));
  static_cast<void>(library_->enroll(second().comm, second().received, kBytes));
  send_one();
  settle();
  EXPECT_TRUE(is_done(second()));
  EXPECT_EQ(received_byte(), 1);
}

// misc/strongstream.cc, "host threads racing to launch NCCL on same device"; UG,
// NCCL_LAUNCH_RACE_FATAL.
TEST_F(NcclRules, LaunchesThatRaceFailWhereTheirOrderCounts) {
  cudaSetDevice(0);
  const std::string other_id = library_->new_id();
  NcclHandle const other = library_->begin_init(1, other_id, 0);
  settle(other);
  for (const bool counts : {false, true}) {
    if (counts) ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    group([&] { library_->send(first().sent, kBytes, 1, first().comm, first().stream); });
    const auto race = [&] {
      group([&] { library_->broadcast(first().received, kBytes, 0, other, first().stream); });
    };
    if (counts) {
      EXPECT_THROW(race(), NcclError);
    } else {
      race();
      settle(other);
    }
    settle(first().comm);
  }
  EXPECT_EQ(nccl_stand_in().races(), 1);
  library_->abort(other);
}

// init.cc, ncclCommEnsureReady: "Attempt to use communicator before the previous operation returned
// ncclSuccess".
TEST_F(NcclRules, ACommunicatorThatIsNotSettledRefusesEveryCall) {
  send_one();
  const std::vector<std::function<void()>> calls{
      [&] { group([&] { library_->send(second().sent, 1, 0, second().comm, second().stream); }); },
      [&] {
        NcclHandle child = nullptr;
        library_->begin_split(second().comm, 0, 0, &child);
      },
      [&] { library_->begin_finalize(second().comm); }};
  for (const auto& call : calls) EXPECT_THROW(call(), NcclError);
  settle();
  library_->begin_finalize(second().comm);
}

using NcclRulesDeathTest = NcclRules;

// nccl.h, ncclCommDestroy and ncclCommAbort: they free the communicator.
TEST_F(NcclRulesDeathTest, ACommunicatorThatHasEndedIsNotUsed) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(
      {
        library_->abort(first().comm);
        static_cast<void>(library_->status(first().comm));
      },
      "a communicator that has ended");
}

// enqueue.cc, ncclLaunchKernel: a kernel of the communicator's device goes to the stream.
TEST_F(NcclRules, AStreamOfAnotherDeviceIsRefused) {
  EXPECT_THAT(
      [&] {
        group([&] { library_->send(first().sent, kBytes, 1, first().comm, second().stream); });
      },
      ThrowsMessage<NcclError>(HasSubstr("end a group")));
}

// UG, ncclCommAbort: what had not come has not come; what the outputs hold is anybody's guess.
TEST_F(NcclRules, AnAbortedReceiveLeavesGarbage) {
  std::memset(second().received, 0, kBytes);
  group([&] { library_->receive(second().received, kBytes, 0, second().comm, second().stream); });
  settle();
  EXPECT_FALSE(is_done(second()));
  library_->abort(std::exchange(second().comm, nullptr));
  cudaStreamSynchronize(second().stream);
  const auto* const bytes = static_cast<const unsigned char*>(second().received);
  EXPECT_TRUE(std::any_of(bytes, bytes + kBytes, [](unsigned char byte) { return byte != 0; }));
}

// allocator.cc, ncclMemAlloc: it passes the device's error on.
TEST_F(NcclRules, MemoryMayRunOut) {
  stand_in::fail_allocation({{.times = 1}});
  EXPECT_THROW(static_cast<void>(library_->allocate(kBytes)), NcclError);
  library_->free(library_->allocate(kBytes));
}

}  // namespace
}  // namespace hsdp::test
