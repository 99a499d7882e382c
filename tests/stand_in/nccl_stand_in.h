// How tests configure the stand-in for libnccl, a shared library that the engine opens like the
// real one. It moves real data between ranks that are threads of one process, on the streams of the
// stand-in for the CUDA runtime. It refuses and punishes what the real one does, as
// nccl_rules_test.cpp shows rule by rule. That it works says nothing about any GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hsdp::stand_in {

// One call that a rank made on a communicator.
struct NcclCall {
  std::string name;  // "send", "recv", "all_gather", ...
  int communicator;  // numbered by the library, the same on all its ranks
  int ranks;         // of the communicator
  int group;         // calls of one group have one number
  std::size_t bytes;
  bool operator==(const NcclCall&) const = default;
};

// Which calls of that name fail: the one that the rank makes after so many others, and following
// ones up to `times`.
struct FailingNcclCall {
  int rank = 0;
  std::string name;  // ncclCommInitRankConfig, ncclCommSplit, ncclCommRegister or ncclMemAlloc
  int result = 0;    // an ncclResult_t
  int after = 0;
  int times = 1;
  bool late = false;  // ncclCommGetAsyncError gives it, of the first two
};

class NcclStandIn {
 public:
  virtual ~NcclStandIn() = default;

  // Forgets the calls and everything that tests asked for.
  virtual void reset() = 0;
  // From now on the rank's communicators report that ncclResult_t.
  virtual void set_error(int rank, int result) = 0;
  // An allocation's rank is the one whose device is current: rank n has device n.
  virtual void fail_call(const FailingNcclCall& which) = 0;
  // From now on the rank's enqueued work moves nothing until it is aborted.
  virtual void hang(int rank) = 0;
  // Abort does not end it either: ncclCommRevoke and ncclCommAbort do not return.
  virtual void hang_aborts() = 0;
  virtual void release() = 0;  // ends both

  [[nodiscard]] virtual std::vector<NcclCall> calls(int rank) const = 0;
  [[nodiscard]] virtual int communicators() const = 0;  // that were not destroyed or aborted
  [[nodiscard]] virtual int aborts() const = 0;
  [[nodiscard]] virtual int revokes() const = 0;
  [[nodiscard]] virtual int enrolled() const = 0;            // registrations not taken back
  [[nodiscard]] virtual std::int64_t allocated() const = 0;  // blocks not freed
  // Races of host threads: two in calls on one communicator, one that registers before its group is
  // settled, and, if NCCL_LAUNCH_ORDER_IMPLICIT is 1, two launches on a device.
  [[nodiscard]] virtual int races() const = 0;
};

}  // namespace hsdp::stand_in

extern "C" hsdp::stand_in::NcclStandIn* hsdp_nccl_stand_in();
