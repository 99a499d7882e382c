// Runs the checks on a GPU.
// Usage: check_device [--list] [--quick] [--only TEXT] [--device INDEX]
// --list prints the names of the checks and needs no GPU.
// Exit status: 0 all hold, 1 some do not, 2 bad usage, 77 there is no GPU.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "check.h"
#include "hsdp/error.h"

namespace hsdp::gpu {
namespace {

constexpr int kSkipped = 77;

struct Options {
  bool list = false;
  Effort effort = Effort::kFull;
  std::string only;
  int device = 0;
};

std::optional<Options> parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--list") {
      options.list = true;
    } else if (argument == "--quick") {
      options.effort = Effort::kQuick;
    } else if (argument == "--only" && i + 1 < count) {
      options.only = arguments[++i];
    } else if (argument == "--device" && i + 1 < count) {
      options.device = std::atoi(arguments[++i]);
    } else {
      return std::nullopt;
    }
  }
  return options;
}

std::string run(const Check& check, Device device) {
  try {
    return check.run(Stream::create(device, "check"));
  } catch (const std::exception& error) {
    return std::string("it threw: ") + error.what();
  }
}

int list_all(const Options& options) {
  for (const Check& check : all_checks(options.effort)) std::printf("%s\n", check.name.c_str());
  return 0;
}

int run_all(const Options& options) {
  const Device device{DeviceType::kCuda, options.device};
  try {
    static_cast<void>(Stream::create(device, "check"));
  } catch (const UsageError& error) {
    std::printf("skipped: %s\n", error.what());
    return kSkipped;
  }
  int failed = 0;
  int ran = 0;
  for (const Check& check : all_checks(options.effort)) {
    if (check.name.find(options.only) == std::string::npos) continue;
    const auto start = std::chrono::steady_clock::now();
    const std::string problem = run(check, device);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%-6s %6.2f s  %s%s%s\n", problem.empty() ? "ok" : "FAILED", took.count(),
                check.name.c_str(), problem.empty() ? "" : ": ", problem.c_str());
    std::fflush(stdout);
    ++ran;
    if (!problem.empty()) ++failed;
  }
  std::printf("%d of %d checks hold on %s\n", ran - failed, ran, to_string(device).c_str());
  return failed == 0 && ran > 0 ? 0 : 1;
}

}  // namespace
}  // namespace hsdp::gpu

int main(int count, char** arguments) {
  const auto options = hsdp::gpu::parse(count, arguments);
  if (!options) {
    std::fprintf(stderr, "usage: check_device [--list] [--quick] [--only TEXT] [--device INDEX]\n");
    return 2;
  }
  try {
    return options->list ? hsdp::gpu::list_all(*options) : hsdp::gpu::run_all(*options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "check_device: %s\n", error.what());
    return 1;
  }
}
