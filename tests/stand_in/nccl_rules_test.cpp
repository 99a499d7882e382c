// What the stand-in for libnccl refuses or punishes, and where the real one does so: source files
// of NCCL 2.28.9, or its User Guide (UG).
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "cuda_stand_in.h"
#include "nccl/nccl.h"
#include "nccl_pair.h"
#include "nccl_ranks.h"

namespace hsdp::test {
namespace {

using comm::NcclError;
using comm::NcclHandle;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Calls that the library does not make, with an answer of one number.
ncclResult_t ask(const char* name, const NcclPair::Rank& of) {
  static void* const file = ::dlopen(HSDP_NCCL_STAND_IN, RTLD_NOW | RTLD_LOCAL);
  int answer = 0;
  using Ask = ncclResult_t (*)(ncclComm_t, int*);
  return reinterpret_cast<Ask>(::dlsym(file, name))(static_cast<ncclComm_t>(of.comm), &answer);
}

class NcclRules : public NcclPair {
 protected:
  // Rank 0's side of a message to rank 1.
  void send() {
    group([&] { library_->send(first().sent, kBytes, 1, first().comm, first().stream); });
  }
  void receive() {
    group([&] { library_->receive(second().received, kBytes, 0, second().comm, second().stream); });
  }
  void broadcast_on(NcclHandle other) {
    group([&] { library_->broadcast(first().received, kBytes, 0, other, first().stream); });
  }
  // Only the sender is settled.
  void send_one() {
    send();
    settle(first().comm);
    receive();
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
    static_cast<void>(library_->enroll(only->comm, memory, kBytes));
    send_one();
    settle();
    EXPECT_FALSE(is_done(second()));
    EXPECT_FALSE(is_done(first()));
    connect();
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
// NCCL_LAUNCH_RACE_FATAL. Those threads are NCCL's own, one for each group of non-blocking
// communicators (group.cc, ncclGroupEndInternal), so that it takes no second thread of the caller.
TEST_F(NcclRules, LaunchesThatRaceFailWhereTheirOrderCounts) {
  NcclHandle const other = alone();
  for (const bool counts : {false, true}) {
    if (counts) ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    send();
    if (counts) {
      EXPECT_THROW(broadcast_on(other), NcclError);
    } else {
      broadcast_on(other);
      settle(other);
    }
    settle(first().comm);
  }
  expected_races_ = 1;
  library_->abort(std::exchange(first().comm, nullptr));  // its kernel is before the other's
  library_->abort(other);
}

// The same: what one group holds one thread launches, and a group that is settled is over.
TEST_F(NcclRules, OneThreadDoesNotRaceWithItself) {
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
  NcclHandle const other = alone();
  group([&] {
    library_->send(first().sent, kBytes, 1, first().comm, first().stream);
    library_->broadcast(first().received, kBytes, 0, other, first().stream);
  });
  for (NcclHandle const each : {first().comm, other}) settle(each);
  broadcast_on(other);
  settle(other);
  send();
  settle(first().comm);
  library_->abort(std::exchange(first().comm, nullptr));  // its kernel is before the other's
  library_->abort(other);
}

// UG, Thread Safety: a communicator is for one thread at a time. Nothing is locked in enqueue.cc,
// taskAppend, nor where init.cc, ncclCommGetAsyncError, ends the communicator's group job.
TEST_F(NcclRules, TwoThreadsInCallsOnOneCommunicatorRace) {
  group([&] {
    library_->send(first().sent, kBytes, 1, first().comm, first().stream);
    static_cast<void>(library_->status(first().comm));
    std::thread([&] { static_cast<void>(library_->status(second().comm)); }).join();
    EXPECT_EQ(nccl_stand_in().races(), 0);
    std::thread([&] { static_cast<void>(library_->status(first().comm)); }).join();
    EXPECT_EQ(nccl_stand_in().races(), 1);
  });
  settle(first().comm);
  std::thread([&] { static_cast<void>(library_->status(first().comm)); }).join();
  expected_races_ = 1;
}

// The same, for calls that take only a moment.
TEST_F(NcclRules, TwoThreadsThatCallAtOnceAreFound) {
  std::atomic<bool> over = false;
  std::thread other([&] {
    while (!over) static_cast<void>(library_->status(first().comm));
  });
  while (nccl_stand_in().races() == 0) static_cast<void>(library_->status(first().comm));
  over = true;
  other.join();
  expected_races_ = nccl_stand_in().races();
}

// init.cc, ncclCommEnsureReady, which ncclCommCount and ncclCommUserRank call, too: "Attempt to use
// communicator before the previous operation returned ncclSuccess".
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
  const char* const questions[] = {"ncclCommCount", "ncclCommUserRank"};
  for (const char* name : questions) EXPECT_EQ(ask(name, second()), ncclInvalidArgument);
  settle();
  for (const char* name : questions) EXPECT_EQ(ask(name, second()), ncclSuccess);
  library_->begin_finalize(second().comm);
}

// register/register.cc, ncclRegister and commDeregister: nothing is asked and nothing locked, while
// the thread that launches a group (group.cc) may look its memory up in the same list.
TEST_F(NcclRules, RegisteringBeforeACommunicatorIsSettledRaces) {
  send_one();
  EXPECT_THROW(static_cast<void>(library_->enroll(second().comm, second().received, kBytes)),
               NcclError);
  EXPECT_EQ(nccl_stand_in().races(), 1);
  settle();
  EXPECT_TRUE(is_done(second()));
  void* const enrolled = library_->enroll(second().comm, second().received, kBytes);
  group([&] { library_->send(second().sent, 1, 0, second().comm, second().stream); });
  library_->withdraw(second().comm, enrolled);
  expected_races_ = 2;
  EXPECT_EQ(nccl_stand_in().enrolled(), 1);
  settle();
}

// init.cc, ncclCommAbort sets the flags that end the kernels, then waits for them
// (commDestroySync): after it nothing uses the memory. In a group it waits at the end, so that no
// communicator waits for one whose turn comes later.
TEST_F(NcclRules, AnAbortWaitsForItsKernels) {
  NcclHandle const other = alone();
  nccl_stand_in().hang(0);
  send();
  settle(first().comm);
  broadcast_on(other);
  settle(other);
  library_->group_start();
  library_->abort(other);  // its kernel is behind the one that hangs
  library_->abort(std::exchange(first().comm, nullptr));
  library_->group_end();
  library_->free(std::exchange(first().sent, library_->allocate(kBytes)));  // else it is punished
}

// init.cc, ncclCommFinalize: in progress until what was enqueued is over.
TEST_F(NcclRules, AFinalizeWaitsForItsKernels) {
  send_one();
  settle();
  EXPECT_TRUE(is_done(second()));
  receive();
  settle();
  library_->begin_finalize(second().comm);
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(library_->status(second().comm).state, comm::NcclStatus::State::kInProgress);
  }
  send();
  settle();
}

using NcclRulesDeathTest = NcclRules;

// register/register.cc, regCleanup: the peers' mappings go; allocator.cc, ncclMemFree: so does the
// memory. Neither asks whether a kernel is about to use them.
TEST_F(NcclRulesDeathTest, MemoryOfATransferIsNotTakenAway) {
  EXPECT_DEATH(
      {
        void* const enrolled = library_->enroll(second().comm, second().received, kBytes);
        receive();
        settle();
        library_->withdraw(second().comm, enrolled);
      },
      "ncclCommDeregister: memory that a transfer uses");
  EXPECT_DEATH(
      {
        receive();
        settle();
        library_->free(second().received);
      },
      "ncclMemFree: memory that a transfer uses");
  EXPECT_DEATH(
      {
        const stand_in::Standstill nothing_moves;  // not even begun
        receive();
        settle();
        library_->free(second().received);
      },
      "ncclMemFree: memory that a transfer uses");
}

// The same: memory of finished transfers and of other communicators may be freed.
TEST_F(NcclRules, MemoryThatNoTransferUsesIsTakenAway) {
  void* const enrolled = library_->enroll(first().comm, first().received, kBytes);
  send_one();
  settle();
  EXPECT_TRUE(is_done(second()));
  library_->free(std::exchange(second().received, library_->allocate(2 * kBytes)));
  receive();
  settle();
  library_->withdraw(first().comm, enrolled);
  EXPECT_EQ(nccl_stand_in().enrolled(), 0);
  library_->free(std::exchange(second().sent, library_->allocate(kBytes)));
  send();
  settle();
  EXPECT_TRUE(is_done(second()));
}

// nccl.h, ncclCommDestroy and ncclCommAbort: they free the communicator.
TEST_F(NcclRulesDeathTest, ACommunicatorThatHasEndedIsNotUsed) {
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

// UG, ncclCommAbort: what had not arrived is lost, and the contents of the outputs are undefined.
TEST_F(NcclRules, AnAbortedReceiveLeavesGarbage) {
  std::memset(second().received, 0, kBytes);
  receive();
  settle();
  EXPECT_FALSE(is_done(second()));
  library_->abort(std::exchange(second().comm, nullptr));
  cudaStreamSynchronize(second().stream);
  const auto* const bytes = static_cast<const unsigned char*>(second().received);
  EXPECT_TRUE(std::any_of(bytes, bytes + kBytes, [](unsigned char byte) { return byte != 0; }));
}

// init.cc, register/register.cc, allocator.cc: all of them allocate, and pass on what that says
// (CUDACHECK: ncclUnhandledCudaError, ncclCalloc: ncclSystemError); in a thread of NCCL, too.
TEST_F(NcclRules, WhateverIsMadeMayFail) {
  cudaSetDevice(0);
  NcclHandle other = nullptr;
  const std::vector<std::pair<std::string, std::function<void()>>> calls{
      {"ncclCommInitRankConfig", [&] { other = library_->begin_init(1, library_->new_id(), 0); }},
      {"ncclCommSplit", [&] { library_->begin_split(first().comm, 0, 0, &other); }},
      {"ncclCommRegister",
       [&] { library_->withdraw(first().comm, library_->enroll(first().comm, first().sent, 8)); }},
      {"ncclMemAlloc", [&] { library_->free(library_->allocate(8)); }}};
  for (const auto& [name, call] : calls) {
    nccl_stand_in().fail_call({.rank = 0, .name = name, .result = ncclSystemError});
    EXPECT_THROW(call(), NcclError) << name;
  }
  nccl_stand_in().fail_call({.rank = 0,
                             .name = "ncclCommInitRankConfig",
                             .result = ncclUnhandledCudaError,
                             .late = true});
  calls[0].second();
  EXPECT_EQ(library_->status(other).state, comm::NcclStatus::State::kError);
  library_->abort(other);
  nccl_stand_in().fail_call(
      {.rank = 0, .name = "ncclCommSplit", .result = ncclUnhandledCudaError, .late = true});
  calls[1].second();
  EXPECT_EQ(library_->status(first().comm).state, comm::NcclStatus::State::kError);
}

// allocator.cc, ncclMemAlloc: it passes the device's error on.
TEST_F(NcclRules, MemoryMayRunOut) {
  stand_in::fail_allocation({{.times = 1}});
  EXPECT_THROW(static_cast<void>(library_->allocate(kBytes)), NcclError);
  library_->free(library_->allocate(kBytes));
}

// CUDA Runtime API, cudaErrorLaunchFailure: the context is of no use any more. NCCL's kernels end
// with it and write nothing, and what NCCL asks of it fails.
TEST_F(NcclRules, AKernelThatFailedEndsNcclsOnItsDevice) {
  receive();
  settle();
  std::memset(second().received, 1, kBytes);
  stand_in::fail_kernel({{.device = 1}});
  cudaSetDevice(1);
  cudaStream_t other = nullptr;
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  EXPECT_EQ(stand_in::enqueue("cudaLaunchKernel", other, [] {}), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(second().stream), cudaErrorLaunchFailure);
  EXPECT_EQ(received_byte(), 1);
  library_->free(second().received);
  send();
  settle(first().comm);
  EXPECT_FALSE(is_done(first())) << "nobody is there to take it";
  stand_in::break_devices(0);
}

// allocator.cc, ncclMemAlloc: from cuMemCreate or cudaMalloc, and nothing clears it.
TEST_F(NcclRules, NewMemoryIsNoNumber) {
  for (int round = 0; round < 3; ++round) {
    auto* const value = static_cast<float*>(library_->allocate(sizeof(float)));
    EXPECT_TRUE(std::isnan(*value));
    *value = 1;
    library_->free(value);
  }
}

}  // namespace
}  // namespace hsdp::test
