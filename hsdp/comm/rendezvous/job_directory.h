// The private directory (mode 0700) in which the ranks of one job on one host find each other's
// Unix socket, named by user, job and restart count, under XDG_RUNTIME_DIR or /tmp
// [Note: rendezvous].
//
// Directories that others own or can enter are refused. Exactly one process holds a name; what a
// dead holder left is replaced. Nothing stays: the holder removes socket and directory, and whoever
// finds the holder dead sweeps behind it.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

// Where the socket called `name` ("rank0") of this job is, alone in a directory. Equal for all
// ranks of the job on this host.
[[nodiscard]] std::filesystem::path job_socket_path(const LaunchEnvironment& launch,
                                                    const std::string& name);

// A listening socket in the job's directory, held by this process.
class JobSocket {
 public:
  // nullopt while another live process holds the name; Error for a hostile directory or no space,
  // DescriptorLimitError at the limit of open files.
  [[nodiscard]] static std::optional<JobSocket> claim(const std::filesystem::path& path,
                                                      int socket_type);
  JobSocket(JobSocket&&) noexcept = default;
  JobSocket& operator=(JobSocket&&) = delete;
  ~JobSocket() { remove(); }

  [[nodiscard]] int listener() const { return listener_.get(); }
  // The listening socket goes to the caller; the path stays until remove().
  [[nodiscard]] UniqueFd take_listener();
  // Unlinks the path, removes the directory, and stops listening.
  void remove();

 private:
  JobSocket(std::filesystem::path path, UniqueFd lock, UniqueFd listener);
  std::filesystem::path path_;
  UniqueFd lock_;  // the directory, under flock: held means alive
  UniqueFd listener_;
  ForkGuard lock_guard_;
  ForkGuard listener_guard_;
};

// Connects to the socket at `path`, served by a process of this user; the result is non-blocking.
// Waits for at most `patience` where more knock than fit into the queue. Empty while nobody listens
// there; Error for a hostile directory.
[[nodiscard]] UniqueFd connect_job_socket(const std::filesystem::path& path, int socket_type,
                                          std::chrono::milliseconds patience);

// Removes what a dead holder left at `path`. False while somebody holds it, whose it stays.
[[nodiscard]] bool sweep_job_socket(const std::filesystem::path& path);

}  // namespace hsdp::comm
