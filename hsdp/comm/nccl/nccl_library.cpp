#include "hsdp/comm/nccl/nccl_library.h"

#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <mutex>

#include "hsdp/comm/nccl/nccl_file.h"

namespace hsdp::comm {
namespace {

constexpr int kOldest = 21800;

std::string version_text(int code) {
  const bool short_code = code < 10'000;  // before 2.9
  const int major = code / (short_code ? 1'000 : 10'000);
  const int minor = code / 100 % (short_code ? 10 : 100);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(code % 100);
}

// Leaves `call` null if the library lacks the symbol.
template <typename Call>
void look_up(void* library, const char* name, Call& call) {
  call = reinterpret_cast<Call>(::dlsym(library, name));
}

ncclComm_t comm_of(NcclHandle handle) { return static_cast<ncclComm_t>(handle); }
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

// Nothing here may block: the engine polls for progress [Note: NCCL without blocking].
ncclConfig_t non_blocking_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

}  // namespace

struct NcclLibrary::Calls {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclGetLastError) last_error;
  decltype(&ncclGetUniqueId) unique_id;
  decltype(&ncclCommInitRankConfig) init;
  decltype(&ncclCommSplit) split;
  decltype(&ncclCommFinalize) finalize;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclCommGetAsyncError) async_error;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclReduceScatter) reduce_scatter;
  // Newer calls, which the header and the library may lack.
  ncclResult_t (*allocate)(void**, std::size_t);                   // 2.19.1
  ncclResult_t (*free)(void*);                                     // 2.19.1
  ncclResult_t (*enroll)(ncclComm_t, void*, std::size_t, void**);  // 2.19.1
  ncclResult_t (*withdraw)(ncclComm_t, void*);                     // 2.19.1
  ncclResult_t (*revoke)(ncclComm_t, int);                         // 2.28.7

  // The name of a call that every version should have and this one lacks, or nullptr.
  const char* resolve(void* library);
};

const char* NcclLibrary::Calls::resolve(void* library) {
  const char* missing = nullptr;
  const auto require = [&](const char* name, auto& call) {
    look_up(library, name, call);
    if (call == nullptr && missing == nullptr) missing = name;
  };
  require("ncclGetErrorString", error_string);
  require("ncclGetLastError", last_error);
  require("ncclGetUniqueId", unique_id);
  require("ncclCommInitRankConfig", init);
  require("ncclCommSplit", split);
  require("ncclCommFinalize", finalize);
  require("ncclCommDestroy", destroy);
  require("ncclCommAbort", abort);
  require("ncclCommGetAsyncError", async_error);
  require("ncclGroupStart", group_start);
  require("ncclGroupEnd", group_end);
  require("ncclSend", send);
  require("ncclRecv", receive);
  require("ncclAllGather", all_gather);
  require("ncclBroadcast", broadcast);
  require("ncclAllReduce", all_reduce);
  require("ncclReduceScatter", reduce_scatter);
  look_up(library, "ncclMemAlloc", allocate);
  look_up(library, "ncclMemFree", free);
  look_up(library, "ncclCommRegister", enroll);
  look_up(library, "ncclCommDeregister", withdraw);
  look_up(library, "ncclCommRevoke", revoke);
  return missing;
}

NcclLibrary::NcclLibrary(void* library) : calls_(std::make_unique<Calls>()) {
  look_up(library, "ncclGetVersion", calls_->get_version);
  if (calls_->get_version != nullptr) {
    path_ = file_of_symbol(reinterpret_cast<void*>(calls_->get_version));
    calls_->get_version(&version_);
  }
  const std::string got = "got " + (version_ == 0 ? "none" : version()) + " in " +
                          (path_.empty() ? std::string("a library that is not NCCL") : path_);
  if (version_ < kOldest) {
    throw UsageError("nccl: expected version 2.18 or newer, " + got +
                     "; install a newer NCCL, or name one in HSDP_NCCL_LIBRARY");
  }
  if (const char* const missing = calls_->resolve(library)) {
    throw UsageError("nccl: expected a library with " + std::string(missing) + ", " + got +
                     " without it; install another NCCL, or name one in HSDP_NCCL_LIBRARY");
  }
}

NcclLibrary::~NcclLibrary() = default;

std::shared_ptr<const NcclLibrary> NcclLibrary::open() {
  return std::shared_ptr<const NcclLibrary>(new NcclLibrary(open_nccl_file()));
}

std::shared_ptr<const NcclLibrary> NcclLibrary::shared() {
  static std::mutex mutex;
  static std::shared_ptr<const NcclLibrary> library;
  const std::lock_guard lock(mutex);
  if (library == nullptr) library = open();
  return library;
}

std::string NcclLibrary::version() const { return version_text(version_); }
bool NcclLibrary::can_revoke() const { return calls_->revoke != nullptr; }
bool NcclLibrary::can_register() const {
  return calls_->allocate != nullptr && calls_->free != nullptr && calls_->enroll != nullptr &&
         calls_->withdraw != nullptr;
}

void NcclLibrary::check(int result, const char* what, NcclHandle on) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* const detail = calls_->last_error(comm_of(on));
  std::string message = calls_->error_string(static_cast<ncclResult_t>(result)) +
                        std::string(" when told to ") + what;
  if (detail != nullptr && *detail != 0) message += std::string(" (") + detail + ")";
  throw NcclError(message, result == ncclRemoteError);
}

std::string NcclLibrary::new_id() const {
  ncclUniqueId id;
  check(calls_->unique_id(&id), "make an id");
  return {id.internal, sizeof(id.internal)};
}

NcclHandle NcclLibrary::begin_init(int size, const std::string& id, int rank) const {
  ncclUniqueId bytes;
  if (id.size() != sizeof(bytes.internal)) {
    throw NcclError("cannot connect: expected an id of " + std::to_string(sizeof(bytes.internal)) +
                        " bytes, got " + std::to_string(id.size()),
                    false);
  }
  std::memcpy(bytes.internal, id.data(), id.size());
  ncclConfig_t config = non_blocking_config();
  ncclComm_t comm = nullptr;
  check(calls_->init(&comm, size, bytes, rank, &config), "connect");
  return comm;
}

void NcclLibrary::begin_split(NcclHandle parent, int color, int key, NcclHandle* child) const {
  ncclConfig_t config = non_blocking_config();
  config.splitShare = 0;
  check(calls_->split(comm_of(parent), color < 0 ? NCCL_SPLIT_NOCOLOR : color, key,
                      reinterpret_cast<ncclComm_t*>(child), &config),
        "split", parent);
}

void NcclLibrary::begin_finalize(NcclHandle handle) const {
  check(calls_->finalize(comm_of(handle)), "finalize", handle);
}

NcclStatus NcclLibrary::status(NcclHandle handle) const {
  ncclResult_t result = ncclSuccess;
  const ncclResult_t asked = calls_->async_error(comm_of(handle), &result);
  if (asked != ncclSuccess) result = asked;
  if (result == ncclSuccess) return {};
  if (result == ncclInProgress) return {NcclStatus::State::kInProgress, {}};
  NcclStatus status{
      result == ncclRemoteError ? NcclStatus::State::kRemoteError : NcclStatus::State::kError,
      calls_->error_string(result)};
  const char* const detail = calls_->last_error(comm_of(handle));
  if (detail != nullptr && *detail != 0) status.text += std::string(" (") + detail + ")";
  return status;
}

void NcclLibrary::destroy(NcclHandle handle) const noexcept { calls_->destroy(comm_of(handle)); }
void NcclLibrary::abort(NcclHandle handle) const noexcept { calls_->abort(comm_of(handle)); }
void NcclLibrary::revoke(NcclHandle handle) const noexcept {
  if (can_revoke()) calls_->revoke(comm_of(handle), 0);
}

void NcclLibrary::group_start() const { check(calls_->group_start(), "begin a group of calls"); }
void NcclLibrary::group_end() const { check(calls_->group_end(), "end a group of calls"); }

void NcclLibrary::send(const void* data, std::size_t bytes, int peer, NcclHandle on,
                       void* stream) const {
  check(calls_->send(data, bytes, ncclUint8, peer, comm_of(on), stream_of(stream)), "send", on);
}

void NcclLibrary::receive(void* data, std::size_t bytes, int peer, NcclHandle on,
                          void* stream) const {
  check(calls_->receive(data, bytes, ncclUint8, peer, comm_of(on), stream_of(stream)), "receive",
        on);
}

void NcclLibrary::all_gather(const void* in, void* out, std::size_t row_bytes, NcclHandle on,
                             void* stream) const {
  check(calls_->all_gather(in, out, row_bytes, ncclUint8, comm_of(on), stream_of(stream)), "gather",
        on);
}

void NcclLibrary::broadcast(void* data, std::size_t bytes, int root, NcclHandle on,
                            void* stream) const {
  check(calls_->broadcast(data, data, bytes, ncclUint8, root, comm_of(on), stream_of(stream)),
        "broadcast", on);
}

void NcclLibrary::all_reduce(float* data, std::size_t count, NcclHandle on, void* stream) const {
  check(calls_->all_reduce(data, data, count, ncclFloat32, ncclSum, comm_of(on), stream_of(stream)),
        "all-reduce", on);
}

void NcclLibrary::reduce_scatter(const float* in, float* out, std::size_t row_count, NcclHandle on,
                                 void* stream) const {
  check(calls_->reduce_scatter(in, out, row_count, ncclFloat32, ncclSum, comm_of(on),
                               stream_of(stream)),
        "reduce-scatter", on);
}

void* NcclLibrary::allocate(std::size_t bytes) const {
  void* memory = nullptr;
  check(calls_->allocate(&memory, bytes), "allocate");
  return memory;
}

void NcclLibrary::free(void* memory) const noexcept { calls_->free(memory); }

void* NcclLibrary::enroll(NcclHandle on, void* memory, std::size_t bytes) const {
  void* enrolled = nullptr;
  check(calls_->enroll(comm_of(on), memory, bytes, &enrolled), "register memory", on);
  return enrolled;
}

void NcclLibrary::withdraw(NcclHandle on, void* enrolled) const noexcept {
  calls_->withdraw(comm_of(on), enrolled);
}

}  // namespace hsdp::comm
