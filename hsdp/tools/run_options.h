// The command line of hsdp_run.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace hsdp::tools {

struct RunOptions {
  bool help = false;
  int rank_count = 0;
  std::chrono::milliseconds grace{15'000};
  std::vector<std::string> command;  // program and arguments, untouched
};

// `arguments` excludes the name of hsdp_run. Throws UsageError for an invalid command line.
[[nodiscard]] RunOptions parse_run_options(const std::vector<std::string>& arguments);
[[nodiscard]] std::string run_help();

}  // namespace hsdp::tools
