// A rank started by hsdp_run: a process in its own group, with its output on two pipes.
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
  int exec_error = 0;  // errno if the program could not be run
};

struct RankPlan {
  std::vector<std::string> command;
  int rank = 0;
  int size = 1;
  std::string job;
  std::string secret;
};

// Returns once the program runs or has failed to. The kernel kills it when this process dies.
[[nodiscard]] RankProcess start_rank(const RankPlan& plan);

}  // namespace hsdp::tools
