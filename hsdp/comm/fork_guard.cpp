#include "hsdp/comm/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

namespace hsdp::comm {
namespace {

// Never destroyed: threads may still release guards while the process exits.
struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
};

Registry& registry() {
  static auto* const instance = new Registry;  // NOLINT(cppcoreguidelines-owning-memory)
  return *instance;
}

std::atomic<std::uint32_t> generation{0};

void before_fork() { registry().mutex.lock(); }

void in_parent() { registry().mutex.unlock(); }

void in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (const int fd : registry().descriptors) ::close(fd);
  registry().descriptors.clear();
  registry().mutex.unlock();
}

void install_handlers() {
  static const int installed = ::pthread_atfork(before_fork, in_parent, in_child);
  static_cast<void>(installed);
}

}  // namespace

ForkGuard::ForkGuard(int fd) : fd_(fd) {
  install_handlers();
  const std::lock_guard lock(registry().mutex);
  registry().descriptors.insert(fd);
}

ForkGuard::ForkGuard(ForkGuard&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

ForkGuard& ForkGuard::operator=(ForkGuard&& other) noexcept {
  if (this != &other) {
    release();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void ForkGuard::release() {
  if (fd_ < 0) return;
  const std::lock_guard lock(registry().mutex);
  registry().descriptors.erase(std::exchange(fd_, -1));
}

std::uint32_t fork_generation() {
  install_handlers();  // or a fork before the first guard would not be counted
  return generation.load(std::memory_order_relaxed);
}

}  // namespace hsdp::comm
