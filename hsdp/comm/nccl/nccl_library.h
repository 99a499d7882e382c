// libnccl as the engine uses it. It is opened at run time, so that one build works with any version
// from 2.18, with the one that a framework has loaded, and without any.
//
// Search order: the file named by HSDP_NCCL_LIBRARY; the libnccl.so.2 that the process has already
// loaded; the loader's; that of the Python package nvidia-nccl next to ours. It stays open.
// Thread-safe. Calls throw NcclError; none of them waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hsdp/error.h"

namespace hsdp::comm {

using NcclHandle = void*;  // ncclComm_t

// NCCL refused a call, or reported later that one failed.
class NcclError : public Error {
 public:
  NcclError(const std::string& message, bool remote) : Error(message), remote_(remote) {}
  [[nodiscard]] bool remote() const { return remote_; }  // a peer or the network is at fault

 private:
  bool remote_;
};

struct NcclStatus {
  enum class State : std::uint8_t { kSuccess, kInProgress, kRemoteError, kError };
  State state = State::kSuccess;
  std::string text;  // of an error
  [[nodiscard]] bool failed() const {
    return state == State::kRemoteError || state == State::kError;
  }
};

class NcclLibrary {
 public:
  // Throws UsageError if there is none, if it is too old, or if it lacks a call.
  [[nodiscard]] static std::shared_ptr<const NcclLibrary> open();
  // Like open(), but once per process.
  [[nodiscard]] static std::shared_ptr<const NcclLibrary> shared();
  ~NcclLibrary();
  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  [[nodiscard]] std::string version() const;  // "2.28.9"
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool can_revoke() const;
  [[nodiscard]] bool can_register() const;

  [[nodiscard]] std::string new_id() const;
  // Start what status() completes. The child's handle is set once the parent has succeeded.
  [[nodiscard]] NcclHandle begin_init(int size, const std::string& id, int rank) const;
  void begin_split(NcclHandle parent, int color, int key, NcclHandle* child) const;
  void begin_finalize(NcclHandle handle) const;
  [[nodiscard]] NcclStatus status(NcclHandle handle) const;
  // End a communicator; errors are ignored.
  void destroy(NcclHandle handle) const noexcept;
  void abort(NcclHandle handle) const noexcept;
  void revoke(NcclHandle handle) const noexcept;  // no effect if the library cannot

  void group_start() const;
  void group_end() const;
  // Enqueue on a cudaStream_t.
  void send(const void* data, std::size_t bytes, int peer, NcclHandle on, void* stream) const;
  void receive(void* data, std::size_t bytes, int peer, NcclHandle on, void* stream) const;
  void all_gather(const void* in, void* out, std::size_t row_bytes, NcclHandle on,
                  void* stream) const;
  void broadcast(void* data, std::size_t bytes, int root, NcclHandle on, void* stream) const;
  void all_reduce(float* data, std::size_t count, NcclHandle on, void* stream) const;
  void reduce_scatter(const float* in, float* out, std::size_t row_count, NcclHandle on,
                      void* stream) const;

  // If can_register(): NCCL's preferred memory, and registering it with one communicator.
  [[nodiscard]] void* allocate(std::size_t bytes) const;
  void free(void* memory) const noexcept;
  [[nodiscard]] void* enroll(NcclHandle on, void* memory, std::size_t bytes) const;
  void withdraw(NcclHandle on, void* enrolled) const noexcept;

 private:
  struct Calls;
  explicit NcclLibrary(void* library);
  void check(int result, const char* what, NcclHandle on = nullptr) const;

  std::unique_ptr<Calls> calls_;
  std::string path_;
  int version_ = 0;
};

}  // namespace hsdp::comm
