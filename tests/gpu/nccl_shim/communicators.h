// The state of each communicator of this process, and the rules about when one may be used. Reports
// violations to the trace. Thread-safe; holds no lock while NCCL is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>

struct ncclComm;  // of nccl.h

namespace hsdp::nccl_shim {

using Handle = ncclComm*;  // ncclComm_t

// One rank's place in a communicator.
struct Seat {
  std::string communicator;  // all its ranks give it this name
  int rank = -1;             // -1: NCCL was not asked yet
  int size = 0;
  int world_rank = -1;  // in the communicator of ncclCommInitRankConfig that it comes from
  int device = -1;
  int sequence = 0;  // of the rank's calls on it

  [[nodiscard]] std::string text() const;
};

enum class CallKind : std::uint8_t {
  kEnqueue,  // a collective, a send or a receive
  kManage,   // any other call that needs a settled communicator
  kEnd,      // ncclCommAbort and ncclCommRevoke, allowed until it has ended
};

class Communicators {
 public:
  // After ncclCommInitRankConfig, which returned `result`.
  void add(Handle comm, const Seat& seat, int result);

  // Before a call: checks the rules and counts it. Empty for an unknown communicator.
  [[nodiscard]] std::optional<Seat> enter(Handle comm, const std::string& call, CallKind kind);
  void set_place(Handle comm, int rank, int size);  // of a child, as NCCL says

  // Around a call that may go on in NCCL's threads after it returned.
  void begin_work(Handle comm);
  void begin_launch(std::span<const Handle> comms);
  void end_work(std::span<const Handle> comms, const std::string& call, int result);
  // Where NCCL will put the child of a split that begins.
  void await_child(Handle parent, int color, Handle* child);

  // Around ncclCommGetAsyncError. A success settles only what had begun before begin_look().
  [[nodiscard]] std::int64_t begin_look(Handle comm);
  void end_look(Handle comm, std::int64_t look, int result);

  // end() before ncclCommDestroy or ncclCommAbort frees the handle, since a new communicator may
  // get the same address; keep() when NCCL refused.
  void end(Handle comm);
  void keep(Handle comm);
  void revoke(Handle comm);

  void enroll(Handle comm, const void* enrolled, const void* memory, std::size_t bytes);
  void withdraw(Handle comm, const void* enrolled);
  // Empty for no memory.
  [[nodiscard]] std::optional<bool> is_registered(Handle comm, const void* memory,
                                                  std::size_t bytes) const;

  void report_living() const;  // at the end of the process

 private:
  enum class Phase : std::uint8_t { kIdle, kCalling, kInProgress };
  struct Range {
    const char* begin;
    const char* end;
  };
  struct Member {
    Seat seat;
    Phase phase = Phase::kIdle;
    std::int64_t works = 0;
    std::int64_t launch = 0;  // the launch that may be under way, or 0
    std::string failure{};    // why no collective may follow
    int splits = 0;
    Seat child{};
    Handle* child_place = nullptr;
    std::multimap<const void*, Range> registered{};  // by NCCL's handle
  };

  // With the lock held.
  [[nodiscard]] Member* find(Handle comm);
  [[nodiscard]] Member* require(Handle comm, const std::string& call);  // reports what is not there
  void settle(Member& member);
  void report_race(const Member& first, const Member& second) const;

  mutable std::mutex mutex_;
  std::map<Handle, Member> members_;
  std::map<Handle, Member> ended_;
  std::int64_t launches_ = 0;
};

[[nodiscard]] Communicators& communicators();

}  // namespace hsdp::nccl_shim
