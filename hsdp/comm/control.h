// The control connection of one rank: small messages between ranks, and the one place where a
// failure becomes known [Note: one control connection]. It carries no data.
//
// One per rank and world. Thread-safe. Every wait ends [Note: bounded waits]: with the answer, even
// if the world has ended since it came, or with the error that ended the world. Rank 0 relays: over
// sockets (ProcessControl), or in memory if ranks are threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/agreement.h"
#include "hsdp/comm/control_link_stats.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp {
class OperationRecord;
}  // namespace hsdp

namespace hsdp::comm {

enum class FailureKind : std::uint8_t { kPeerLost, kTimeout, kMismatch, kAborted };

// Why a world ended. The first failure wins on every rank.
struct Failure {
  FailureKind kind = FailureKind::kPeerLost;
  std::string message;
  std::vector<int> ranks;  // world ranks at fault
};

// Throws the exception for `failure`.
[[noreturn]] void throw_failure(const Failure& failure);

// For tell(): throws UsageError unless `peer` is another rank of the world.
void require_other_rank(int peer, int rank, int size);

// What a rank is doing, for messages and for deciding which rank is at fault.
struct WaitState {
  std::string_view operation;  // "reduce_scatter", "all_reduce", "status", ...
  int bucket = -1;
  int peer = -1;  // world rank waited for, -1: several or none
};

// How a rank's world stands.
struct ControlReport {
  struct Wait {
    std::string operation;
    int bucket = -1;
    int peer = -1;  // world rank, -1: several, or one that is not known here
    double seconds = 0;
  };
  std::vector<Wait> waits;  // oldest first
  std::string error;        // what ended the world; empty: it has not ended
};

class Control {
 public:
  virtual ~Control() = default;

  [[nodiscard]] virtual int rank() const = 0;  // in the world
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;
  // Whether file descriptors can be passed to that rank (same host, same job directory).
  [[nodiscard]] virtual bool shares_memory_with(int peer) const = 0;
  // Whether all ranks are threads of this process: memory then needs no segment.
  [[nodiscard]] virtual bool in_process() const = 0;
  // Numbers the hosts of the world, as far as ranks can tell them apart.
  [[nodiscard]] virtual int host_of(int /*peer*/) const { return 0; }
  // The address by which peers on other hosts reach this rank (numeric IP), for data listeners.
  [[nodiscard]] virtual std::string address() const = 0;
  // Proves both ends of a fresh TCP data connection; empty when no secret is needed (one host).
  [[nodiscard]] virtual const std::string& secret() const = 0;

  // What every member says, merged. `post` never blocks; `collect` waits until all have posted.
  // `members` are ascending world ranks that include this rank. `key` names the exchange and is
  // used once per member list (group id + sequence number). Errors contain `waiting`.
  virtual void post(std::string_view key, std::span<const int> members, const Saying& mine) = 0;
  [[nodiscard]] virtual Agreement collect(std::string_view key, std::span<const int> members,
                                          WaitState waiting) = 0;
  // Like collect(), but gives up after `time`, which is less than the timeout, and may be called
  // again: for words that may be late without any rank at fault. A member that is lost, or has
  // closed its world, ends it like any wait.
  [[nodiscard]] virtual std::optional<Agreement> collect_within(std::string_view key,
                                                                std::span<const int> members,
                                                                WaitState waiting,
                                                                std::chrono::milliseconds time) = 0;
  // One message from every member to every member, in rank order.
  [[nodiscard]] std::vector<std::string> exchange(std::string_view key,
                                                  std::span<const int> members,
                                                  std::string_view message, WaitState waiting) {
    post(key, members, message_to_all(std::string(message)));
    return collect(key, members, waiting).messages(members);
  }

  // Like exchange() among all ranks of the world. Returns nothing if one of them has closed it, on
  // every rank that uses this key. If no rank can close it alone, it is exchange().
  [[nodiscard]] virtual std::optional<std::vector<std::string>> exchange_while_open(
      std::string_view key, std::string_view message, WaitState waiting);

  // Sends one message to one other rank, which never answers. Never blocks. Messages of a rank on
  // one topic arrive in order; without a listener there they are dropped.
  virtual void tell(int peer, std::string_view topic, std::string_view message) = 0;
  // From now on calls `hear` for every message on that topic, one at a time, on other threads. Keep
  // it short. Dropping the returned handle ends it, and waits for a running call.
  using Hear = std::function<void(int from, std::string_view message)>;
  [[nodiscard]] virtual std::shared_ptr<void> listen(std::string_view topic, Hear hear) = 0;

  // Like exchange(), for one file descriptor per member; all members share memory with each other.
  // This rank's own place in the result is empty. The caller keeps `fd`.
  [[nodiscard]] virtual std::vector<UniqueFd> exchange_descriptors(std::string_view key,
                                                                   std::span<const int> members,
                                                                   int fd) = 0;

  // Traffic on each of this rank's links, by ascending peer. If ranks are threads, the only link is
  // to rank 0, which also relays.
  [[nodiscard]] virtual std::vector<ControlLinkStats> links() const = 0;

  // Announces a wait in each heartbeat. Several threads of a rank may wait at once; `begin_wait`
  // returns the slot that `end_wait` frees. Call it only before a real sleep.
  [[nodiscard]] virtual int begin_wait(WaitState state) = 0;
  virtual void end_wait(int slot) = 0;

  // Ends the world on every rank. The first failure wins; later calls change nothing. Never blocks.
  virtual void fail(const Failure& failure) = 0;
  [[nodiscard]] virtual bool failed() const = 0;  // one atomic load: for wait loops
  virtual void throw_if_failed() const = 0;
  // The same for a call that did not wait: `operation` says what this rank was doing, in case the
  // end only names a rank.
  virtual void throw_if_failed_in(std::string_view operation) const {
    static_cast<void>(operation);
    throw_if_failed();
  }
  // Calls `wake` once, from another thread, when the world ends: wakes threads that sleep elsewhere
  // (a futex, a socket). Keep it short. Dropping the returned handle removes the callback; like
  // that of listen(), the handle may outlive the Control.
  [[nodiscard]] virtual std::shared_ptr<void> on_failure(std::function<void()> wake) = 0;

  // For the flight record: changes nothing in what later calls throw.
  [[nodiscard]] virtual ControlReport report() const { return {}; }
  [[nodiscard]] std::shared_ptr<OperationRecord> operations();

 private:
  std::once_flag has_operations_;
  std::shared_ptr<OperationRecord> operations_;
};

}  // namespace hsdp::comm
