// One rank that hsdp_run started: a process in a group of its own, its output on two pipes.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "hsdp/comm/unique_fd.h"

namespace hsdp::tools {

struct RankProcess {
  pid_t pid = -1;
  comm::UniqueFd output;  // its standard output, non-blocking
  comm::UniqueFd errors;
  int exec_error = 0;  // errno when the program could not be run
};

struct RankPlan {
  std::vector<std::string> command;
  int rank = 0;
  int size = 1;
  std::string job;
  std::string secret;
};

// Returns when the program runs, or could not be run. The process is killed when this one dies.
[[nodiscard]] RankProcess start_rank(const RankPlan& plan);

}  // namespace hsdp::tools
