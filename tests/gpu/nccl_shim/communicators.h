// The state of each communicator of this process, and the rules about when one may be used. Writes
// violations to the trace. Thread-safe. Holds no lock while NCCL is called.
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
  std::string communicator;  // the name that all its ranks give it
  int rank = -1;             // -1: not yet asked of NCCL
  int size = 0;
  int world_rank = -1;  // in the first communicator, from which the others were split
  int device = -1;
  int sequence = 0;  // number of the rank's call on the communicator

  [[nodiscard]] std::string text() const;
};

enum class CallKind : std::uint8_t {
  kEnqueue,  // a collective, a send or a receive
  kManage,   // any other call that needs a settled communicator
  kEnd,      // ncclCommAbort and ncclCommRevoke, allowed until the communicator has ended
};

class Communicators {
 public:
  // Call after ncclCommInitRankConfig, which returned `result`.
  void add(Handle comm, const Seat& seat, int result);

  // Checks the rules before a call and counts the call. Returns nothing for an unknown
  // communicator.
  [[nodiscard]] std::optional<Seat> enter(Handle comm, const std::string& call, CallKind kind);
  void set_place(Handle comm, int rank, int size);  // of a child, as NCCL reports them

  // Called before and after a call whose work may continue in NCCL's threads after it returns.
  void begin_work(Handle comm);
  void begin_launch(std::span<const Handle> comms);
  void end_work(std::span<const Handle> comms, const std::string& call, int result);
  // `child` is where NCCL will write the handle that a split makes. Call before the split.
  void await_child(Handle parent, int color, Handle* child);

  // Called before and after ncclCommGetAsyncError. Success settles only work that had begun before
  // begin_look().
  [[nodiscard]] std::int64_t begin_look(Handle comm);
  void end_look(Handle comm, std::int64_t look, int result);

  // Call end() before ncclCommDestroy or ncclCommAbort frees the handle, since a new communicator
  // may get the same address. Call keep() if NCCL refused.
  void end(Handle comm);
  void keep(Handle comm);
  void revoke(Handle comm);

  void enroll(Handle comm, const void* enrolled, const void* memory, std::size_t bytes);
  void withdraw(Handle comm, const void* enrolled);
  // Whether the memory is registered; nothing if there is no memory.
  [[nodiscard]] std::optional<bool> is_registered(Handle comm, const void* memory,
                                                  std::size_t bytes) const;

  void report_living() const;  // call at the end of the process

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
    std::string failure{};    // why no collective may follow, or empty
    int splits = 0;
    Seat child{};
    Handle* child_place = nullptr;
    std::multimap<const void*, Range> registered{};  // by NCCL's handle
  };

  // Call these with the lock held.
  [[nodiscard]] Member* find(Handle comm);
  [[nodiscard]] Member* require(Handle comm, const std::string& call);  // reports an unknown one
  void settle(Member& member);
  void report_race(const Member& first, const Member& second) const;

  mutable std::mutex mutex_;
  std::map<Handle, Member> members_;
  std::map<Handle, Member> ended_;
  std::int64_t launches_ = 0;
};

[[nodiscard]] Communicators& communicators();

}  // namespace hsdp::nccl_shim
