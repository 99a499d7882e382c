#include "hsdp/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/error.h"

namespace hsdp {
namespace {

using testing::ElementsAre;
using testing::Pair;

std::vector<std::pair<LogLevel, std::string>> lines_of_sink;

void keep(LogLevel level, std::string line) { lines_of_sink.emplace_back(level, std::move(line)); }

// What one line of each level writes to stderr.
std::string written() {
  lines_of_sink.clear();
  testing::internal::CaptureStderr();
  log_line(LogLevel::kDebug, "a step");
  log_line(LogLevel::kInfo, "a mesh");
  log_line(LogLevel::kWarning, "a warning");
  return testing::internal::GetCapturedStderr();
}

class Log : public testing::Test {
 protected:
  static void ask_for(const char* level) {
    ::setenv("HSDP_LOG", level, 1);
    read_log_level();
  }
  void TearDown() override {
    ::unsetenv("HSDP_LOG");
    read_log_level();
    set_log_sink(nullptr, 0);
  }
};

TEST_F(Log, WritesWarningsAndWhatTheVariableAsksFor) {
  EXPECT_EQ(written(), "hsdp: a warning\n");
  EXPECT_FALSE(is_logged(LogLevel::kInfo));
  ask_for("info");
  EXPECT_EQ(written(), "hsdp: a mesh\nhsdp: a warning\n");
  EXPECT_FALSE(is_logged(LogLevel::kDebug));
  ask_for("debug");
  EXPECT_EQ(written(), "hsdp: a step\nhsdp: a mesh\nhsdp: a warning\n");
  for (const char* const level : {"", "warning", "Warning"}) {
    ask_for(level);
    EXPECT_EQ(written(), "hsdp: a warning\n") << level;
  }
}

TEST_F(Log, TakesTheVariableInAnyCaseOfLetters) {
  ask_for("INFO");
  EXPECT_EQ(written(), "hsdp: a mesh\nhsdp: a warning\n");
  ask_for("Debug");
  EXPECT_EQ(written(), "hsdp: a step\nhsdp: a mesh\nhsdp: a warning\n");
}

TEST_F(Log, ASinkGetsWhatItWantsAndStderrWhatElseTheVariableAsksFor) {
  set_log_sink(keep, 20);
  EXPECT_TRUE(is_logged(LogLevel::kInfo));
  EXPECT_FALSE(is_logged(LogLevel::kDebug));
  EXPECT_EQ(written(), "");
  EXPECT_THAT(lines_of_sink, ElementsAre(Pair(LogLevel::kInfo, "hsdp: a mesh"),
                                         Pair(LogLevel::kWarning, "hsdp: a warning")));
  ask_for("debug");
  EXPECT_EQ(written(), "hsdp: a step\n");
  EXPECT_EQ(lines_of_sink.size(), 2U);
  ask_for("");
  set_log_sink(keep, 40);  // errors only
  EXPECT_FALSE(is_logged(LogLevel::kWarning));
  EXPECT_EQ(written(), "");
  EXPECT_TRUE(lines_of_sink.empty());
  ask_for("warning");
  EXPECT_EQ(written(), "hsdp: a warning\n");
}

TEST_F(Log, AnotherValueIsAnErrorThatNamesTheChoices) {
  try {
    ask_for("all");
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "launch: HSDP_LOG: expected warning, info or debug, got 'all'; unset it for "
                 "warnings alone");
  }
}

}  // namespace
}  // namespace hsdp
