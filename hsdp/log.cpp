#include "hsdp/log.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include "hsdp/error.h"

namespace hsdp {
namespace {

constexpr int kNothing = std::numeric_limits<int>::max();

std::atomic<int> variable_level{kNothing};  // of HSDP_LOG
std::atomic<int> sink_level{kNothing};
std::atomic<LogSink> log_sink{nullptr};

int number(LogLevel level) { return static_cast<int>(level); }

int stderr_level() {
  const int level = variable_level.load(std::memory_order_relaxed);
  const bool has_sink = log_sink.load(std::memory_order_relaxed) != nullptr;
  return has_sink ? level : std::min(level, number(LogLevel::kWarning));
}

}  // namespace

void read_log_level() {
  const char* const text = std::getenv("HSDP_LOG");
  const std::string given = text == nullptr ? "" : text;
  std::string value = given;
  for (char& letter : value) {
    if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
  }
  int level = kNothing;
  if (value == "warning") {
    level = number(LogLevel::kWarning);
  } else if (value == "info") {
    level = number(LogLevel::kInfo);
  } else if (value == "debug") {
    level = number(LogLevel::kDebug);
  } else if (!value.empty()) {
    throw UsageError({.where = "launch: HSDP_LOG",
                      .expected = "warning, info or debug",
                      .got = "'" + given + "'",
                      .remedy = "unset it for warnings alone"});
  }
  variable_level.store(level, std::memory_order_relaxed);
}

bool is_logged(LogLevel level) {
  return number(level) >= std::min(stderr_level(), sink_level.load(std::memory_order_relaxed));
}

void log_line(LogLevel level, const std::string& text) {
  std::string line = "hsdp: " + text;
  const LogSink sink = log_sink;
  if (sink != nullptr && number(level) >= sink_level) return sink(level, std::move(line));
  if (number(level) >= stderr_level()) std::fprintf(stderr, "%s\n", line.c_str());
}

void set_log_sink(LogSink sink, int level) {
  log_sink = sink;
  sink_level = sink == nullptr ? kNothing : level;
}

}  // namespace hsdp
