// The switch of the faults planted in C++; fault.py explains it. A forked process keeps its
// parent's fault.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace hsdp_mutants {

inline constexpr int kMost = 4096;

// Creates a file named after the fault in the folder HSDP_FAULTS_REACHED.
inline void tell_that_it_is_reached(int number) {
  static std::array<std::atomic<bool>, kMost> told;
  static const char* const folder = std::getenv("HSDP_FAULTS_REACHED");
  if (folder == nullptr || told.at(static_cast<std::size_t>(number)).exchange(true)) return;
  std::array<char, 4096> path{};
  std::snprintf(path.data(), path.size(), "%s/%d", folder, number);
  const int file = ::open(path.data(), O_CREAT | O_CLOEXEC | O_WRONLY, 0644);
  if (file >= 0) ::close(file);
}

inline bool is_active(int number) {
  static const char* const text = std::getenv("HSDP_FAULT");
  static const int active = text == nullptr ? 0 : std::atoi(text);
  tell_that_it_is_reached(number);
  return number == active;
}

// A fault is never active in code that the compiler evaluates.
constexpr bool fault(int number) {
  return std::is_constant_evaluated() ? false : is_active(number);
}

}  // namespace hsdp_mutants
