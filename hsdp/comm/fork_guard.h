// Keeps a forked child (a data loader) from holding our connections open or using them
// [Note: fork].
//
// While a ForkGuard lives, a child made by fork() closes its copy of the descriptor at once, so
// that peers see this process end even if a child lives on. Thread-safe.
#pragma once

#include <cstdint>

namespace hsdp::comm {

class ForkGuard {
 public:
  ForkGuard() = default;
  explicit ForkGuard(int fd);
  ~ForkGuard() { release(); }
  ForkGuard(ForkGuard&& other) noexcept;
  ForkGuard& operator=(ForkGuard&& other) noexcept;
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  void release();  // call it before closing the descriptor

 private:
  int fd_ = -1;
};

// Counts the forks between the first process and this one. An object made at another generation
// belongs to the parent: its threads do not exist here and its descriptors are closed.
[[nodiscard]] std::uint32_t fork_generation();

}  // namespace hsdp::comm
