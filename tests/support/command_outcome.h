// Runs a shell command and keeps what it printed.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace hsdp::test {

struct CommandOutcome {
  int status = -1;     // exit status; -1: a signal ended it, or it did not start
  std::string output;  // stdout and stderr, except what the command redirects
};

[[nodiscard]] inline CommandOutcome run_command(const std::string& command) {
  CommandOutcome outcome;
  FILE* const pipe = ::popen(("{ " + command + "\n} 2>&1").c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "no shell for " << command;
    return outcome;
  }
  std::array<char, 4096> buffer{};
  for (std::size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    outcome.output.append(buffer.data(), got);
  }
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) outcome.status = WEXITSTATUS(status);
  return outcome;
}

}  // namespace hsdp::test
