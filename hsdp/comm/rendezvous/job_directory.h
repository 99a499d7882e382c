// The private directory (mode 0700) where the ranks of a job on one host find each other's Unix
// socket, under XDG_RUNTIME_DIR or /tmp. Named by user, job and restart count [Note: rendezvous].
//
// Directories that other users own or can enter are refused. Exactly one process holds a name. The
// holder removes socket and directory; what a dead holder left is removed or replaced by the
// process that finds it.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

// The path of this job's socket called `name` ("rank0"), alone in a directory. The same for all
// ranks of the job on this host.
[[nodiscard]] std::filesystem::path job_socket_path(const LaunchEnvironment& launch,
                                                    const std::string& name);

// A listening socket in the job's directory, held by this process.
class JobSocket {
 public:
  // nullopt while another live process holds the name. Throws Error for an unsafe directory or a
  // full disk, and DescriptorLimitError at the limit of open files.
  [[nodiscard]] static std::optional<JobSocket> claim(const std::filesystem::path& path,
                                                      int socket_type);
  JobSocket(JobSocket&&) noexcept = default;
  JobSocket& operator=(JobSocket&&) = delete;
  ~JobSocket() { remove(); }

  [[nodiscard]] int listener() const { return listener_.get(); }
  // Hands the listening socket to the caller; the path stays until remove().
  [[nodiscard]] UniqueFd take_listener();
  // Unlinks the path, removes the directory, and stops listening.
  void remove();

 private:
  JobSocket(std::filesystem::path path, UniqueFd lock, UniqueFd listener);
  std::filesystem::path path_;
  UniqueFd lock_;  // the directory, under flock: locked means alive
  UniqueFd listener_;
  ForkGuard lock_guard_;
  ForkGuard listener_guard_;
};

// Connects to the socket at `path` of a process of this user; returns a non-blocking socket. If the
// listener's queue is full, waits for at most `patience`. Empty if no process listens there; throws
// Error for an unsafe directory.
[[nodiscard]] UniqueFd connect_job_socket(const std::filesystem::path& path, int socket_type,
                                          std::chrono::milliseconds patience);

// Removes what a dead holder left at `path`. Returns false if a live process holds it.
[[nodiscard]] bool sweep_job_socket(const std::filesystem::path& path);

}  // namespace hsdp::comm
