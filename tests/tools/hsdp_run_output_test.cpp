// What hsdp_run does with the output of its ranks, also when nothing reads it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/tools/running_job.h"

namespace hsdp::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(HsdpRunOutputTest, LinesAreNeverTorn) {
  // Each line in two writes, from four ranks at once.
  RunningJob run({"-n", "4"},
                 "i=0; while [ $i -lt 300 ]; do printf \"aaaaaaaaaaaaaaaaaaaa$RANK\"; "
                 "printf \"bbbbbbbbbb$RANK\\n\"; i=$((i+1)); done");
  EXPECT_EQ(run.finish(), 0);
  std::array<int, 4> counts{};
  for (const std::string& line : lines_of(run.out())) {
    ASSERT_GE(line.size(), 2U);
    const std::string rank(1, line[1]);
    ASSERT_EQ(line, "[" + rank + "] aaaaaaaaaaaaaaaaaaaa" + rank + "bbbbbbbbbb" + rank);
    ++counts[static_cast<std::size_t>(rank[0] - '0')];
  }
  EXPECT_THAT(counts, ElementsAre(300, 300, 300, 300));
}

TEST(HsdpRunOutputTest, OutputThatNobodyReadsDoesNotHoldIt) {
  RunningJob run({"-n", "2"}, "while :; do echo line; done");
  ASSERT_TRUE(run.await_lines("line", 2));
  run.close_output();
  EXPECT_NE(run.finish(), 0);
  EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
}

TEST(HsdpRunOutputTest, SignalsPassAStalledReader) {
  for (const int fd : {1, 2}) {
    SCOPED_TRACE(fd);
    const std::string script = "yes $0 >&" + std::to_string(fd);
    RunningJob run({"-n", "2"}, script);
    ASSERT_TRUE(run.await_stall(fd));
    ::kill(run.pid(), SIGTERM);
    EXPECT_EQ(run.finish_unread(15), 128 + SIGTERM);
    EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
    if (fd == 1) {
      run.finish();
      EXPECT_THAT(run.err(), HasSubstr("the rest of it is lost"));
    }
  }
}

TEST(HsdpRunOutputTest, TheGraceRunsWhileTheReaderStalls) {
  for (const int fd : {1, 2}) {
    SCOPED_TRACE(fd);
    RunningJob run({"-n", "2", "--grace-s=0.2"},
                   "[ $RANK != 0 ] || { sleep 1; exit 3; }; yes $0 >&" + std::to_string(fd));
    ASSERT_TRUE(run.await_stall(fd));
    EXPECT_EQ(run.finish_unread(15), 3);
    EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
  }
}

// More than a pipe holds and less than hsdp_run reads ahead: the ranks end, and hsdp_run waits.
class HsdpRunReaderTest : public ::testing::Test {
 protected:
  void await_the_ranks_end() {
    ASSERT_TRUE(run_.await_stall(1));
    ASSERT_TRUE(eventually([&] { return processes_with(run_.mark()).size() == 2; }));
  }
  RunningJob run_{{"-n", "2"}, "yes | head -n 20000"};
};

TEST_F(HsdpRunReaderTest, IsWaitedFor) {
  await_the_ranks_end();
  EXPECT_EQ(run_.finish_unread(3), -1);
  EXPECT_EQ(run_.finish(), 0);
  EXPECT_EQ(lines_of(run_.out()).size(), 40000U);
  EXPECT_EQ(run_.err(), "");
}

TEST_F(HsdpRunReaderTest, IsNotWaitedForAfterASignal) {
  await_the_ranks_end();
  ::kill(run_.pid(), SIGTERM);
  EXPECT_EQ(run_.finish_unread(15), 128 + SIGTERM);
}

TEST(HsdpRunOutputTest, BearsClosedStandardStreams) {
  struct Row {
    std::string redirect;
    std::vector<std::string> output;
  };
  const std::vector<Row> rows{{"2>&1 >&-", {"[0] err", "[1] err"}},
                              {"2>&-", {"[0] out", "[1] out"}},
                              {"2>/dev/null <&-", {"[0] out", "[1] out"}},
                              {"<&- >&- 2>&-", {}}};
  for (const Row& row : rows) {
    SCOPED_TRACE(row.redirect);
    const std::string command =
        "timeout -k 1 20 " HSDP_RUN " -n 2 sh -c 'echo out; echo err >&2' " + row.redirect;
    FILE* pipe = ::popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::array<char, 4096> buffer{};
    const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe);
    EXPECT_EQ(::pclose(pipe), 0);
    EXPECT_THAT(lines_of(std::string(buffer.data(), n)),
                ::testing::UnorderedElementsAreArray(row.output));
  }
}

}  // namespace
}  // namespace hsdp::test
