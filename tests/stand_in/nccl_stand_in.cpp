// The calls of libnccl, on the machine of the stand-in.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "nccl_machine.h"

using namespace hsdp::stand_in;  // NOLINT(google-build-using-namespace): NCCL is global

namespace {

struct Queued {
  std::shared_ptr<Member> member;
  cudaStream_t stream;
  std::vector<Op> ops;
  std::vector<NcclCall> calls;
};
// What a thread has begun. Not thread_local, as a library that is opened late has no good place for
// it.
struct OpenGroup {
  int depth = 0;
  std::vector<Queued> queued;
  std::vector<std::shared_ptr<Member>> used;
  std::vector<std::shared_ptr<Member>> aborted;
};
auto& open_groups = *new std::map<std::thread::id, OpenGroup>;  // under the machine's lock

// With luck, the real one crashes.
[[noreturn]] void punish(const char* call, const char* what) {
  std::fprintf(stderr, "stand-in for NCCL: %s: %s\n", call, what);
  std::abort();
}

// With the lock held.
const std::shared_ptr<Member>& member_of(ncclComm_t comm, const char* call) {
  if (!machine().comms.contains(comm)) punish(call, "a communicator that has ended");
  return comm->member;
}

// With the lock held.
void begin_use(Member& member) {
  ++member.users[std::this_thread::get_id()];
  if (member.users.size() > 1) ++machine().race_count;
}
void end_use(Member& member) {
  const auto user = member.users.find(std::this_thread::get_id());
  if (--user->second == 0) member.users.erase(user);
}

// A call on a communicator. Releases the lock for a moment, in which another thread may show up.
class Visit {
 public:
  Visit(ncclComm_t comm, const char* call)
      : lock_(machine().mutex), member_(member_of(comm, call)) {
    begin_use(*member_);
    lock_.unlock();
    std::this_thread::yield();
    lock_.lock();
  }
  ~Visit() { end_use(*member_); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  Member* operator->() const { return member_.get(); }
  Member& operator*() const { return *member_; }
  [[nodiscard]] const std::shared_ptr<Member>& member() const { return member_; }

 private:
  std::unique_lock<std::mutex> lock_;
  std::shared_ptr<Member> member_;
};

// With the lock held. The kernels of the transfers are not told that their memory goes.
void require_unused(const void* memory, std::size_t size, const Member* of, const char* call) {
  for (const Transfer* const transfer : machine().transfers) {
    if (of != nullptr && !transfer->is_of(*of)) continue;
    if (transfer->uses(memory, size)) punish(call, "memory that a transfer uses");
  }
}

// With the lock held.
bool is_settled(Member& member) {
  if (member.ended || member.error != ncclSuccess) return true;
  return member.clique->arrived >= member.clique->size && member.child == nullptr &&
         member.looks_until_done == 0;
}

ncclResult_t issue(ncclComm_t comm, cudaStream_t stream, const char* name, const Op& op) {
  const Visit visit(comm, name);
  if (!is_settled(*visit)) return ncclInvalidArgument;
  const auto open = open_groups.find(std::this_thread::get_id());
  if (open == open_groups.end()) return ncclInvalidUsage;  // our engine groups everything
  std::vector<Queued>& queued = open->second.queued;
  const auto& member = visit.member();
  if (std::ranges::find(open->second.used, member) == open->second.used.end()) {
    open->second.used.push_back(member);
    begin_use(*member);
  }
  const auto same = [&](const Queued& q) { return q.member == member && q.stream == stream; };
  auto place = std::ranges::find_if(queued, same);
  if (place == queued.end()) place = queued.insert(place, {member, stream, {}, {}});
  place->ops.push_back(op);
  place->calls.push_back({name, member->clique->number, member->clique->size, 0, op.bytes});
  return ncclSuccess;
}

// With the lock held.
bool is_set(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "1";
}

// With the lock held. Another thread of NCCL launches on the device, and their order matters.
bool races(const Member& member) {
  return is_set("NCCL_LAUNCH_ORDER_IMPLICIT") &&
         std::ranges::any_of(machine().comms, [&](ncclComm_t comm) {
           const Member& other = *comm->member;
           return other.launching >= 0 && other.launching != member.launching &&
                  other.device == member.device;
         });
}

// NCCL launches on the communicator's device, whatever the thread's current one is.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&saved_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(saved_); }

 private:
  int saved_ = 0;
};

ncclResult_t start(Queued& work, int launch) {
  Machine& m = machine();
  std::shared_ptr<const Transfer> transfer;
  {
    const std::lock_guard lock(m.mutex);
    const int group = m.next_group++;
    for (NcclCall& call : work.calls) {
      call.group = group;
      m.log[work.member->world_rank].push_back(call);
    }
    work.member->looks_until_done = 2;
    work.member->launching = launch;
    if (races(*work.member)) {
      ++m.race_count;
      return work.member->error = ncclInvalidUsage;
    }
    transfer = std::make_shared<Transfer>(work.member, work.ops);
  }
  const OnDevice current(work.member->device);
  const cudaError_t status =
      enqueue("ncclGroupEnd", work.stream,
              [work, transfer = std::move(transfer)] { run_ops(*work.member, work.ops); });
  return status == cudaSuccess ? ncclInProgress : ncclUnhandledCudaError;
}

// With the lock held. Ranks of one color form a clique when all ranks have called.
bool finish_split(Member& member) {
  Clique& clique = *member.clique;
  const auto& calls = clique.splits[member.splits - 1];
  if (static_cast<int>(calls.size()) < clique.size) return false;
  const auto [color, key] = calls.at(member.rank);
  ncclComm_t* const place = std::exchange(member.child, nullptr);
  if (color < 0) return true;
  std::vector<std::pair<int, int>> order;  // key, rank
  for (const auto& [rank, choice] : calls) {
    if (choice.first == color) order.emplace_back(choice.second, rank);
  }
  std::ranges::sort(order);
  auto& child = clique.children[{member.splits, color}];
  if (child == nullptr) child = machine().new_clique(static_cast<int>(order.size()));
  ++child->arrived;
  auto made = std::make_shared<Member>();
  made->clique = child;
  made->rank =
      static_cast<int>(std::ranges::find(order, std::pair{key, member.rank}) - order.begin());
  made->world_rank = member.world_rank;
  made->device = member.device;
  *place = new ncclComm{made};
  machine().comms.insert(*place);
  return true;
}

// NCCL frees nothing that a kernel still uses.
void wait_for_transfers(std::unique_lock<std::mutex>& lock, const Member& member) {
  machine().changed.wait(lock, [&member] { return member.transfers == 0; });
}

// In a group the flags that end the kernels are set at once, the rest happens at its end.
ncclResult_t end(ncclComm_t comm, bool by_force) {
  Machine& m = machine();
  {
    std::unique_lock lock(m.mutex);
    const std::shared_ptr<Member> member =
        member_of(comm, by_force ? "ncclCommAbort" : "ncclCommDestroy");
    if (!by_force && !is_settled(*member)) return ncclInvalidArgument;
    if (by_force) {
      ++m.abort_count;
      m.changed.wait(lock, [&m] { return !m.aborts_hang; });
      member->ended = true;
      m.changed.notify_all();
    }
    m.comms.erase(comm);
    const auto open = open_groups.find(std::this_thread::get_id());
    if (open != open_groups.end()) {
      open->second.aborted.push_back(member);
    } else {
      wait_for_transfers(lock, *member);
    }
  }
  m.changed.notify_all();
  delete comm;
  return ncclSuccess;
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
  *version = 22809;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  if (result == ncclRemoteError) return "remote process exited or there was a network error";
  if (result == ncclSystemError) return "unhandled system error";
  return "an error that a test asked for";
}

const char* ncclGetLastError(ncclComm_t /*comm*/) { return "as the test wanted"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(machine().mutex);
  std::memset(id, 0, sizeof(*id));
  const std::string name = "stand-in " + std::to_string(machine().next_id++);
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config->blocking != 0 || config->magic != 0xcafebeef) return ncclInvalidArgument;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const Machine::Ending ending = m.ending_of(rank, "ncclCommInitRankConfig");
  if (ending.at_once()) return ending.result;
  auto& clique = m.cliques[std::string(id.internal, sizeof(id.internal))];
  if (clique == nullptr) clique = m.new_clique(size);
  ++clique->arrived;
  auto member = std::make_shared<Member>();
  member->clique = clique;
  member->rank = member->world_rank = rank;
  cudaGetDevice(&member->device);
  member->error = ending.result;
  *comm = new ncclComm{member};
  m.comms.insert(*comm);
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child,
                           ncclConfig_t* config) {
  if (config->blocking != 0 || config->splitShare != 0) return ncclInvalidArgument;
  const Visit member(comm, "ncclCommSplit");
  if (!is_settled(*member)) return ncclInvalidArgument;
  const Machine::Ending ending = machine().ending_of(member->world_rank, "ncclCommSplit");
  if (ending.at_once()) return ending.result;
  member->error = ending.result;
  member->clique->splits[member->splits++][member->rank] = {color, key};
  *child = nullptr;
  member->child = child;
  return ncclSuccess;  // as NCCL does, though it has only begun (init.cc)
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  const Visit member(comm, "ncclCommUserRank");
  if (!is_settled(*member)) return ncclInvalidArgument;
  *rank = member->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  const Visit member(comm, "ncclCommCount");
  if (!is_settled(*member)) return ncclInvalidArgument;
  *count = member->clique->size;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Visit member(comm, "ncclCommFinalize");
  if (!is_settled(*member)) return ncclInvalidArgument;
  member->finalizing = true;
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end(comm, false); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return end(comm, true); }

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (flags != 0) return ncclInvalidArgument;
  Machine& m = machine();
  {
    std::unique_lock lock(m.mutex);
    m.changed.wait(lock, [&m] { return !m.aborts_hang; });
    ++m.revoke_count;
    member_of(comm, "ncclCommRevoke")->ended = true;
  }
  m.changed.notify_all();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  Machine& m = machine();
  const Visit visit(comm, "ncclCommGetAsyncError");
  Member& member = *visit;
  const auto error = m.errors.find(member.world_rank);
  if (error != m.errors.end()) {
    *result = error->second;
  } else if (member.error != ncclSuccess) {
    *result = member.error;
  } else if (member.clique->arrived < member.clique->size ||
             (member.child != nullptr && !finish_split(member)) || member.looks_until_done > 0 ||
             (member.finalizing && member.transfers > 0)) {
    if (member.looks_until_done > 0) --member.looks_until_done;
    *result = ncclInProgress;
  } else {
    *result = ncclSuccess;
    member.launching = -1;
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  const std::lock_guard lock(machine().mutex);
  ++open_groups[std::this_thread::get_id()].depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  OpenGroup group;
  int launch = 0;
  {
    const std::lock_guard lock(machine().mutex);
    const auto open = open_groups.find(std::this_thread::get_id());
    if (open == open_groups.end()) return ncclInvalidUsage;
    if (--open->second.depth > 0) return ncclSuccess;
    group = std::move(open->second);
    open_groups.erase(open);
    launch = machine().next_launch++;
  }
  ncclResult_t result = ncclSuccess;
  for (Queued& work : group.queued) result = start(work, launch);
  std::unique_lock lock(machine().mutex);
  for (const std::shared_ptr<Member>& member : group.used) end_use(*member);
  for (const std::shared_ptr<Member>& member : group.aborted) wait_for_transfers(lock, *member);
  return result;
}

ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t /*type*/, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, "send", {Op::Kind::kSend, data, nullptr, count, peer});
}

ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t /*type*/, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, "recv", {Op::Kind::kReceive, nullptr, data, count, peer});
}

ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count, ncclDataType_t /*type*/,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, "all_gather", {Op::Kind::kGather, in, out, count, 0});
}

ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t /*type*/,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, "broadcast", {Op::Kind::kBroadcast, in, out, count, root});
}

ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  if (type != ncclFloat32 || operation != ncclSum) return ncclInvalidArgument;
  return issue(comm, stream, "all_reduce", {Op::Kind::kReduce, in, out, count * sizeof(float), 0});
}

ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  if (type != ncclFloat32 || operation != ncclSum) return ncclInvalidArgument;
  return issue(comm, stream, "reduce_scatter",
               {Op::Kind::kReduceScatter, in, out, count * sizeof(float), 0});
}

ncclResult_t ncclMemAlloc(void** memory, std::size_t size) {
  int device = 0;
  cudaGetDevice(&device);
  {
    const std::lock_guard lock(machine().mutex);
    const Machine::Ending ending = machine().ending_of(device, "ncclMemAlloc");
    if (ending.at_once()) return ending.result;
  }
  if (cudaHostAlloc(memory, size, 0) != cudaSuccess) return ncclUnhandledCudaError;
  const std::lock_guard lock(machine().mutex);
  machine().blocks[*memory] = size;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* memory) {
  int device = 0;
  cudaGetDevice(&device);
  if (is_broken(device)) return ncclUnhandledCudaError;
  {
    const std::lock_guard lock(machine().mutex);
    const auto block = machine().blocks.find(memory);
    if (block == machine().blocks.end()) punish("ncclMemFree", "memory that was freed");
    require_unused(memory, block->second, nullptr, "ncclMemFree");
    machine().blocks.erase(block);
  }
  cudaFreeHost(memory);
  return ncclSuccess;
}

// They look in a list without a lock, while a thread of NCCL may use it until the group is settled.
ncclResult_t ncclCommRegister(ncclComm_t comm, void* memory, std::size_t size, void** handle) {
  const Visit member(comm, "ncclCommRegister");
  if (!is_settled(*member)) {
    ++machine().race_count;
    return ncclInvalidArgument;
  }
  const Machine::Ending ending = machine().ending_of(member->world_rank, "ncclCommRegister");
  if (ending.at_once()) return ending.result;
  member->enrolled[memory] = size;
  *handle = memory;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  const Visit member(comm, "ncclCommDeregister");
  if (!is_settled(*member)) {
    ++machine().race_count;
    return ncclInvalidArgument;
  }
  const auto enrolled = member->enrolled.find(handle);
  if (enrolled == member->enrolled.end()) return ncclInvalidUsage;
  if (is_broken(member->device)) return ncclUnhandledCudaError;
  require_unused(handle, enrolled->second, &*member, "ncclCommDeregister");
  member->enrolled.erase(enrolled);
  return ncclSuccess;
}
