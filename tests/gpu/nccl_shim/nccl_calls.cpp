// The functions of libnccl that hsdp loads. Each checks the rules, writes a line to the trace,
// calls the real function and returns its result unchanged.
#include <nccl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "communicators.h"
#include "device_rules.h"
#include "real_library.h"
#include "trace.h"

using namespace hsdp::nccl_shim;  // NOLINT(google-build-using-namespace): NCCL is global

namespace {

// Calls the real library's function of this name, which has the type of `ours`.
template <typename... Parameters, typename... Arguments>
ncclResult_t forward([[maybe_unused]] ncclResult_t (*ours)(Parameters...), const char* name,
                     Arguments... arguments) {
  const auto call = reinterpret_cast<decltype(ours)>(real_symbol(name));
  return call == nullptr ? ncclSystemError : call(arguments...);
}

// The groups that each thread has opened with ncclGroupStart. They are not thread_local, because
// ThreadSanitizer reports a race on such storage of a library that is loaded late.
class OpenGroups {
 public:
  void begin() {
    const std::lock_guard lock(mutex_);
    Group& group = groups_[std::this_thread::get_id()];
    if (group.depth++ == 0) group.number = ++last_number_;
  }
  // Ends this thread's innermost group. Returns the communicators with work in it; none while an
  // outer group is open.
  std::vector<Handle> end() {
    const std::lock_guard lock(mutex_);
    const auto group = groups_.find(std::this_thread::get_id());
    if (group == groups_.end() || --group->second.depth > 0) return {};
    return std::move(groups_.extract(group).mapped().comms);
  }
  // Call only while a group is open.
  void add(Handle comm) {
    const std::lock_guard lock(mutex_);
    std::vector<Handle>& comms = groups_[std::this_thread::get_id()].comms;
    if (std::ranges::find(comms, comm) == comms.end()) comms.push_back(comm);
  }
  [[nodiscard]] bool is_open() const {
    const std::lock_guard lock(mutex_);
    return groups_.contains(std::this_thread::get_id());
  }
  // The number of the open group. A call outside of a group counts as a group.
  [[nodiscard]] int number() {
    const std::lock_guard lock(mutex_);
    const auto group = groups_.find(std::this_thread::get_id());
    return group == groups_.end() ? ++last_number_ : group->second.number;
  }

 private:
  struct Group {
    int depth = 0;
    int number = 0;
    std::vector<Handle> comms{};
  };
  mutable std::mutex mutex_;
  std::map<std::thread::id, Group> groups_;
  int last_number_ = 0;
};

OpenGroups& open_groups() {
  static auto* const one = new OpenGroups;  // never destroyed: threads may use it during exit
  return *one;
}

std::string name_of(const ncclUniqueId& id) {
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a
  for (const char c : std::string_view(id.internal, sizeof(id.internal))) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(hash));
  return text.data();
}

std::size_t size_of(ncclDataType_t type) {
  // In the order of ncclDataType_t.
  constexpr std::array<std::size_t, 12> kBytes{1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  const auto index = static_cast<std::size_t>(type);
  return index < kBytes.size() ? kBytes[index] : 1;
}

ncclResult_t ask_place(ncclComm_t comm, int* rank, int* size) {
  using Ask = ncclResult_t (*)(ncclComm_t, int*);
  const auto ask_rank = reinterpret_cast<Ask>(real_symbol("ncclCommUserRank"));
  const auto ask_size = reinterpret_cast<Ask>(real_symbol("ncclCommCount"));
  if (ask_rank == nullptr || ask_size == nullptr) return ncclSystemError;
  const ncclResult_t result = ask_rank(comm, rank);
  return result == ncclSuccess ? ask_size(comm, size) : result;
}

// Checks a call before it is made. Returns a default seat for an unknown communicator.
Seat enter(ncclComm_t comm, const char* call, CallKind kind) {
  std::optional<Seat> seat = communicators().enter(comm, call, kind);
  if (!seat) return {};
  if (kind == CallKind::kEnd) return *seat;  // a broken communicator takes no other call
  if (seat->rank < 0 && ask_place(comm, &seat->rank, &seat->size) == ncclSuccess) {
    communicators().set_place(comm, seat->rank, seat->size);
  }
  check_device(call, *seat);
  return *seat;
}

// Checks and traces a call that enqueues nothing.
Seat enter_and_trace(ncclComm_t comm, const char* call, CallKind kind, std::size_t bytes = 0) {
  Seat seat = enter(comm, call, kind);
  trace_call(seat, {.name = call, .group = open_groups().number(), .bytes = bytes});
  return seat;
}

// What a call enqueues, in rows of `bytes` bytes.
struct Work {
  const char* name;
  const void* in = nullptr;
  const void* out = nullptr;
  std::size_t bytes = 0;
  std::optional<int> peer{};
  std::optional<int> dtype{};
  std::optional<int> operation{};
  bool reads_all = false;  // reads a row for each rank, else one row
  bool writes_all = false;
};

template <typename Forward>
ncclResult_t enqueue(ncclComm_t comm, cudaStream_t stream, const Work& work, Forward forward_it) {
  const Seat seat = enter(comm, work.name, CallKind::kEnqueue);
  check_stream(work.name, seat, stream);
  const auto is_registered = [&](const void* memory, bool all) -> std::optional<bool> {
    if (memory == nullptr) return std::nullopt;
    const auto rows = static_cast<std::size_t>(all ? seat.size : 1);
    return communicators().is_registered(comm, memory, rows * work.bytes);
  };
  trace_call(seat, {.name = work.name,
                    .group = open_groups().number(),
                    .peer = work.peer,
                    .bytes = work.bytes,
                    .dtype = work.dtype,
                    .operation = work.operation,
                    .in = is_registered(work.in, work.reads_all),
                    .out = is_registered(work.out, work.writes_all)});
  const bool alone = !open_groups().is_open();
  if (alone) communicators().begin_launch({&comm, 1});
  const ncclResult_t result = forward_it();
  const bool refused = result != ncclSuccess && result != ncclInProgress;
  if (alone || refused) {
    communicators().end_work({&comm, 1}, work.name, result);
  } else {
    open_groups().add(comm);
  }
  return result;
}

template <typename Forward>
ncclResult_t end(ncclComm_t comm, const char* call, CallKind kind, Forward forward_it) {
  enter_and_trace(comm, call, kind);
  communicators().end(comm);
  const ncclResult_t result = forward_it();
  if (result != ncclSuccess && result != ncclInProgress) communicators().keep(comm);
  return result;
}

using Revoke = ncclResult_t(ncclComm_t, int);
constexpr const char* kRevoke = "ncclCommRevoke";

ncclResult_t trace_and_revoke(ncclComm_t comm, int flags) {
  enter_and_trace(comm, kRevoke, CallKind::kEnd);
  communicators().revoke(comm);
  return forward(static_cast<Revoke*>(nullptr), kRevoke, comm, flags);
}

// Runs after the destructors of the program's objects, which may own communicators.
[[gnu::destructor]] void at_exit() { communicators().report_living(); }

}  // namespace

// nccl.h may be older and lack the functions at the end of this file.
extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = 0;
  return forward(&ncclGetVersion, "ncclGetVersion", version);
}

const char* ncclGetErrorString(ncclResult_t result) {
  const auto call =
      reinterpret_cast<decltype(&ncclGetErrorString)>(real_symbol("ncclGetErrorString"));
  return call == nullptr ? open_error().c_str() : call(result);
}

const char* ncclGetLastError(ncclComm_t comm) {
  const auto call = reinterpret_cast<decltype(&ncclGetLastError)>(real_symbol("ncclGetLastError"));
  return call == nullptr ? open_error().c_str() : call(comm);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return forward(&ncclGetUniqueId, "ncclGetUniqueId", id);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const Seat seat{.communicator = name_of(id),
                  .rank = rank,
                  .size = size,
                  .world_rank = rank,
                  .device = current_device()};
  trace_call(seat, {.name = "ncclCommInitRankConfig", .group = open_groups().number()});
  const ncclResult_t result =
      forward(&ncclCommInitRankConfig, "ncclCommInitRankConfig", comm, size, id, rank, config);
  if (result == ncclSuccess || result == ncclInProgress) communicators().add(*comm, seat, result);
  return result;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child,
                           ncclConfig_t* config) {
  enter_and_trace(comm, "ncclCommSplit", CallKind::kManage);
  communicators().await_child(comm, color, child);
  communicators().begin_work(comm);
  const ncclResult_t result =
      forward(&ncclCommSplit, "ncclCommSplit", comm, color, key, child, config);
  // For a nonblocking communicator it returns success although NCCL's threads have not yet made the
  // child (init.cc: it returns the result of its own checks, not that of the group).
  const ncclResult_t now = result == ncclSuccess ? ncclInProgress : result;
  communicators().end_work({&comm, 1}, "ncclCommSplit", now);
  return result;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  enter_and_trace(comm, "ncclCommFinalize", CallKind::kManage);
  communicators().begin_work(comm);
  const ncclResult_t result = forward(&ncclCommFinalize, "ncclCommFinalize", comm);
  communicators().end_work({&comm, 1}, "ncclCommFinalize", result);
  return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return end(comm, "ncclCommDestroy", CallKind::kManage,
             [&] { return forward(&ncclCommDestroy, "ncclCommDestroy", comm); });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return end(comm, "ncclCommAbort", CallKind::kEnd,
             [&] { return forward(&ncclCommAbort, "ncclCommAbort", comm); });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  const std::int64_t look = communicators().begin_look(comm);
  const ncclResult_t asked = forward(&ncclCommGetAsyncError, "ncclCommGetAsyncError", comm, result);
  communicators().end_look(comm, look, asked == ncclSuccess ? *result : asked);
  return asked;
}

ncclResult_t ncclGroupStart() {
  open_groups().begin();
  return forward(&ncclGroupStart, "ncclGroupStart");
}

ncclResult_t ncclGroupEnd() {
  const std::vector<Handle> comms = open_groups().end();
  communicators().begin_launch(comms);
  const ncclResult_t result = forward(&ncclGroupEnd, "ncclGroupEnd");
  communicators().end_work(comms, "ncclGroupEnd", result);
  return result;
}

ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  const Work work{
      .name = "send", .in = data, .bytes = count * size_of(type), .peer = peer, .dtype = type};
  return enqueue(comm, stream, work, [&] {
    return forward(&ncclSend, "ncclSend", data, count, type, peer, comm, stream);
  });
}

ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  const Work work{
      .name = "receive", .out = data, .bytes = count * size_of(type), .peer = peer, .dtype = type};
  return enqueue(comm, stream, work, [&] {
    return forward(&ncclRecv, "ncclRecv", data, count, type, peer, comm, stream);
  });
}

ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const Work work{.name = "all_gather",
                  .in = in,
                  .out = out,
                  .bytes = count * size_of(type),
                  .dtype = type,
                  .writes_all = true};
  return enqueue(comm, stream, work, [&] {
    return forward(&ncclAllGather, "ncclAllGather", in, out, count, type, comm, stream);
  });
}

ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  const Work work{.name = "broadcast",
                  .out = out,  // not `in`: only the root reads it, so there is nothing to compare
                  .bytes = count * size_of(type),
                  .peer = root,
                  .dtype = type};
  return enqueue(comm, stream, work, [&] {
    return forward(&ncclBroadcast, "ncclBroadcast", in, out, count, type, root, comm, stream);
  });
}

ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  const Work work{.name = "all_reduce",
                  .in = in,
                  .out = out,
                  .bytes = count * size_of(type),
                  .dtype = type,
                  .operation = operation};
  return enqueue(comm, stream, work, [&] {
    return forward(&ncclAllReduce, "ncclAllReduce", in, out, count, type, operation, comm, stream);
  });
}

ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  const Work work{.name = "reduce_scatter",
                  .in = in,
                  .out = out,
                  .bytes = count * size_of(type),
                  .dtype = type,
                  .operation = operation,
                  .reads_all = true};
  return enqueue(comm, stream, work, [&] {
    return forward(&ncclReduceScatter, "ncclReduceScatter", in, out, count, type, operation, comm,
                   stream);
  });
}

ncclResult_t ncclMemAlloc(void** memory, std::size_t size) {
  return forward(&ncclMemAlloc, "ncclMemAlloc", memory, size);
}

ncclResult_t ncclMemFree(void* memory) { return forward(&ncclMemFree, "ncclMemFree", memory); }

ncclResult_t ncclCommRegister(ncclComm_t comm, void* memory, std::size_t size, void** handle) {
  enter_and_trace(comm, "ncclCommRegister", CallKind::kManage, size);
  const ncclResult_t result =
      forward(&ncclCommRegister, "ncclCommRegister", comm, memory, size, handle);
  if (result == ncclSuccess) communicators().enroll(comm, *handle, memory, size);
  return result;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  enter_and_trace(comm, "ncclCommDeregister", CallKind::kManage);
  communicators().withdraw(comm, handle);
  return forward(&ncclCommDeregister, "ncclCommDeregister", comm, handle);
}

// A program concludes from this function that NCCL is 2.28.7 or newer. So dlsym must find it only
// if the real library has it. The dynamic loader runs find_revoke() during the look-up and returns
// its result.
Revoke* find_revoke() { return real_symbol(kRevoke) == nullptr ? nullptr : &trace_and_revoke; }
[[gnu::ifunc("find_revoke")]] ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
}
