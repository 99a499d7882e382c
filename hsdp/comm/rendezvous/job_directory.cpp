#include "hsdp/comm/rendezvous/job_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr mode_t kPrivate = 0700;
constexpr mode_t kOthers = 0077;

std::string last_error() { return std::generic_category().message(errno); }

bool is_private(const struct stat& status) {
  return S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & kOthers) == 0;
}

void refuse(const std::filesystem::path& directory) {
  throw Error({.where = "rendezvous: " + directory.string(),
               .expected = "a directory of this user with mode 0700",
               .got = "something else",
               .remedy = "remove it, or set another HSDP_JOB"});
}

// nullopt: it does not exist. Refuses directories that are not private, and links.
std::optional<UniqueFd> open_private(const std::filesystem::path& directory) {
  UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd) {
    if (errno == ENOENT) return std::nullopt;
    throw_if_descriptor_limit("rendezvous: cannot open " + directory.string());
    refuse(directory);
  }
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0 || !is_private(status)) refuse(directory);
  return fd;
}

bool is_still_at(const std::filesystem::path& directory, int fd) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(fd, &opened) == 0 && ::lstat(directory.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

sockaddr_un address_of(const std::filesystem::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.native().size() >= sizeof address.sun_path) {
    throw Error({.where = "rendezvous: path of a socket",
                 .expected = "less than " + std::to_string(sizeof address.sun_path) + " bytes",
                 .got = path.string()});
  }
  std::memcpy(address.sun_path, path.c_str(), path.native().size() + 1);
  return address;
}

const sockaddr* generic(const sockaddr_un& address) {
  return reinterpret_cast<const sockaddr*>(&address);  // NOLINT: the sockets interface
}

UniqueFd open_socket(int type) {
  UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (fd) return fd;
  throw_if_descriptor_limit("rendezvous: cannot open a socket");
  throw Error("rendezvous: cannot open a socket: " + last_error());
}

// Bounds how long connect() waits for a place in the queue of a busy listener.
void bound_connect(int socket, std::chrono::milliseconds patience) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(patience);
  timeval limit{};  // all zero would mean no limit
  limit.tv_sec = seconds.count();
  limit.tv_usec = std::max<suseconds_t>(1, std::chrono::microseconds(patience - seconds).count());
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

void make_non_blocking(int socket) {
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
}

std::filesystem::path base_directory() {
  constexpr std::size_t kMaxBaseBytes = 40;  // a socket path holds 107 bytes
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/' && std::strlen(runtime) <= kMaxBaseBytes) {
    struct stat status {};
    if (::stat(runtime, &status) == 0 && is_private(status) && ::access(runtime, W_OK) == 0) {
      return runtime;
    }
  }
  return "/tmp";
}

}  // namespace

std::filesystem::path job_socket_path(const LaunchEnvironment& launch, const std::string& name) {
  char digest[17];
  std::snprintf(digest, sizeof digest, "%016llx",
                static_cast<unsigned long long>(exchange_hash(launch.job)));
  const std::string directory = "hsdp-" + std::to_string(::geteuid()) + "-" + digest + "-" +
                                std::to_string(launch.restart_count) + "-" + name;
  return base_directory() / directory / "socket";
}

JobSocket::JobSocket(std::filesystem::path path, UniqueFd lock, UniqueFd listener)
    : path_(std::move(path)),
      lock_(std::move(lock)),
      listener_(std::move(listener)),
      lock_guard_(lock_.get()),
      listener_guard_(listener_.get()) {}

std::optional<JobSocket> JobSocket::claim(const std::filesystem::path& path, int socket_type) {
  const std::filesystem::path directory = path.parent_path();
  const sockaddr_un address = address_of(path);
  // A holder that removes the directory at that moment can spoil a round.
  for (int round = 0; round < 100; ++round) {
    if (::mkdir(directory.c_str(), kPrivate) != 0 && errno != EEXIST) {
      throw Error("rendezvous: cannot make " + directory.string() + ": " + last_error());
    }
    std::optional<UniqueFd> lock = open_private(directory);
    if (!lock) continue;
    if (::flock(lock->get(), LOCK_EX | LOCK_NB) != 0) return std::nullopt;
    if (!is_still_at(directory, lock->get())) continue;
    ::unlink(path.c_str());  // left by a dead holder: a live one would hold the lock
    UniqueFd listener = open_socket(socket_type);
    make_non_blocking(listener.get());
    if (::bind(listener.get(), generic(address), sizeof address) != 0 ||
        ::listen(listener.get(), SOMAXCONN) != 0) {
      throw Error("rendezvous: cannot listen at " + path.string() + ": " + last_error());
    }
    return JobSocket(path, std::move(*lock), std::move(listener));
  }
  throw Error({.where = "rendezvous: " + directory.string(),
               .expected = "a directory that stays",
               .got = "one that is removed again and again",
               .remedy = "set HSDP_JOB to a name that no other job has"});
}

UniqueFd JobSocket::take_listener() {
  listener_guard_.release();
  return std::move(listener_);
}

void JobSocket::remove() {
  if (!lock_) return;
  ::unlink(path_.c_str());
  ::rmdir(path_.parent_path().c_str());
  listener_guard_.release();
  listener_.reset();
  lock_guard_.release();
  lock_.reset();
}

UniqueFd connect_job_socket(const std::filesystem::path& path, int socket_type,
                            std::chrono::milliseconds patience) {
  const sockaddr_un address = address_of(path);
  if (!open_private(path.parent_path())) return {};
  UniqueFd fd = open_socket(socket_type);
  bound_connect(fd.get(), patience);
  if (::connect(fd.get(), generic(address), sizeof address) != 0) {
    if (errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return {};
    throw Error("rendezvous: cannot connect to " + path.string() + ": " + last_error());
  }
  make_non_blocking(fd.get());
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 ||
      peer.uid != ::geteuid()) {
    throw Error({.where = "rendezvous: " + path.string(),
                 .expected = "a socket of this user",
                 .got = "another user's",
                 .remedy = "set another HSDP_JOB"});
  }
  return fd;
}

bool sweep_job_socket(const std::filesystem::path& path) {
  const std::filesystem::path directory = path.parent_path();
  UniqueFd lock(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (!lock || ::fstat(lock.get(), &status) != 0 || !is_private(status)) return true;
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return false;
  if (!is_still_at(directory, lock.get())) return true;
  ::unlink(path.c_str());
  ::rmdir(directory.c_str());
  return true;
}

}  // namespace hsdp::comm
