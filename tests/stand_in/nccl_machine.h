// The state behind the stand-in for libnccl: one lock for everything.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_stand_in.h"
#include "tests/stand_in/nccl/nccl.h"

namespace hsdp::stand_in {

struct Message {
  const void* data = nullptr;
  std::size_t bytes = 0;
  int device = 0;         // the sender's
  bool enrolled = false;  // with the sender's communicator
  bool taken = false;
};
using Mail = std::deque<std::shared_ptr<Message>>;

// A communicator as all its ranks see it.
struct Clique {
  int number = 0;
  int size = 0;
  int arrived = 0;
  std::map<std::pair<int, int>, Mail> mail;                         // from, to
  std::map<int, std::map<int, std::pair<int, int>>> splits;         // call, rank: color, key
  std::map<std::pair<int, int>, std::shared_ptr<Clique>> children;  // call, color
};

// A communicator as one rank sees it; enqueued work shares it. Its users are the host threads that
// are in one of its calls or have it in an open group.
struct Member {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int world_rank = 0;
  int device = 0;
  std::map<const void*, std::size_t> enrolled{};  // memory that was registered
  bool ended = false;                             // revoked or aborted: its work moves nothing more
  ncclResult_t error = ncclSuccess;
  int splits = 0;
  ncclComm_t* child = nullptr;  // where a split that is under way puts its result
  int looks_until_done = 0;     // of ncclCommGetAsyncError: connecting takes a while
  int launching = -1;           // the thread of NCCL that launches a group, until it is settled
  bool finalizing = false;
  std::map<std::thread::id, int> users{};  // and how often
  int transfers = 0;                       // enqueued and not over

  [[nodiscard]] bool is_enrolled(const void* memory) const;
};

struct Op;

// What a group has enqueued on one stream, until it has run or been dropped: NCCL uses that memory.
class Transfer {
 public:
  // With the lock held.
  Transfer(std::shared_ptr<Member> member, const std::vector<Op>& ops);
  ~Transfer();  // takes the lock
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  [[nodiscard]] bool is_of(const Member& member) const { return member_.get() == &member; }
  [[nodiscard]] bool uses(const void* memory, std::size_t size) const;

 private:
  std::shared_ptr<Member> member_;
  std::vector<std::pair<const char*, std::size_t>> memory_;
};

class Machine : public NcclStandIn {
 public:
  void reset() override;
  void set_error(int rank, int result) override;
  void fail_call(const FailingNcclCall& which) override;
  void hang(int rank) override;
  void hang_aborts() override;
  void release() override;
  [[nodiscard]] std::vector<NcclCall> calls(int rank) const override;
  [[nodiscard]] int communicators() const override;
  [[nodiscard]] int aborts() const override;
  [[nodiscard]] int revokes() const override;
  [[nodiscard]] int enrolled() const override;
  [[nodiscard]] std::int64_t allocated() const override;
  [[nodiscard]] int races() const override;

  [[nodiscard]] std::shared_ptr<Clique> new_clique(int size);
  // With the lock held: how that call ends, and whether it reports that late.
  struct Ending {
    ncclResult_t result = ncclSuccess;
    bool late = false;
    [[nodiscard]] bool at_once() const { return result != ncclSuccess && !late; }
  };
  [[nodiscard]] Ending ending_of(int rank, const char* call);

  mutable std::mutex mutex;
  std::condition_variable changed;
  int next_clique = 0;
  int next_group = 0;
  int next_id = 0;
  int next_launch = 0;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by id
  std::map<int, ncclResult_t> errors;                      // by world rank
  std::optional<FailingNcclCall> failing_call;
  std::set<int> hanging;
  std::set<ncclComm_t> comms;
  bool aborts_hang = false;
  std::map<int, std::vector<NcclCall>> log;
  int race_count = 0;
  int abort_count = 0;
  int revoke_count = 0;
  std::map<void*, std::size_t> blocks;
  std::set<const Transfer*> transfers;
  std::mt19937 garbage{5};
};

Machine& machine();

// The machine while its lock is held.
class Locked {
 public:
  Machine* operator->() const { return &machine(); }

 private:
  std::lock_guard<std::mutex> lock_{machine().mutex};
};

// What a rank does between ncclGroupStart and ncclGroupEnd.
struct Op {
  enum class Kind { kSend, kReceive, kGather, kBroadcast, kReduce, kReduceScatter } kind;
  const void* in;
  void* out;
  std::size_t bytes;  // of a row
  int peer;
};
// Runs as work of a stream.
void run_ops(Member& member, const std::vector<Op>& ops);

}  // namespace hsdp::stand_in

struct ncclComm {
  std::shared_ptr<hsdp::stand_in::Member> member;
};
