// The command line of hsdp_check.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "hsdp/compare.h"

namespace hsdp {

struct CheckOptions {
  std::filesystem::path a;
  std::optional<std::filesystem::path> b;  // absent: validate `a`
  CompareOptions compare;
  bool digests = false;  // a and b are folders of digests
  bool json = false;
  std::optional<std::filesystem::path> html;
  bool all_rows = false;
  std::optional<std::filesystem::path> flight;  // read flight records, and nothing else
  std::string message;  // if not empty, print it and exit 0 (--help, --version)
};

// Throws UsageError for an invalid command line.
[[nodiscard]] CheckOptions parse_check_options(int argc, const char* const* argv);

}  // namespace hsdp
