// hsdp_run from its user's view: status, output, signals, and no process left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tests/tools/running_job.h"

namespace hsdp::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::UnorderedElementsAre;

TEST(HsdpRunTest, SetsTheVariablesAndPrefixesTheOutput) {
  RunningJob run({"-n", "3"},
                 "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE; echo to stderr >&2; "
                 "echo job ${#HSDP_JOB} secret ${#HSDP_SECRET}; printf 'no newline'; cat");
  EXPECT_EQ(run.finish(), 0);
  EXPECT_THAT(
      lines_of(run.out()),
      UnorderedElementsAre("[0] 0 3 0 3", "[1] 1 3 1 3", "[2] 2 3 2 3", "[0] job 25 secret 64",
                           "[1] job 25 secret 64", "[2] job 25 secret 64", "[0] no newline",
                           "[1] no newline", "[2] no newline"));
  EXPECT_THAT(lines_of(run.err()),
              UnorderedElementsAre("[0] to stderr", "[1] to stderr", "[2] to stderr"));
}

TEST(HsdpRunTest, OffersAnAddressToTorch) {
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
  const std::string say = "echo $MASTER_ADDR:$MASTER_PORT";
  RunningJob offered({"-n", "2"}, say);
  EXPECT_EQ(offered.finish(), 0);
  const std::vector<std::string> lines = lines_of(offered.out());
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_THAT(lines.front(), MatchesRegex("\\[.\\] 127.0.0.1:[1-9][0-9]+"));
  EXPECT_EQ(lines[0].substr(4), lines[1].substr(4));
  ::setenv("MASTER_ADDR", "somewhere", 1);
  RunningJob kept({"-n", "1"}, say);
  EXPECT_EQ(kept.finish(), 0);
  ::unsetenv("MASTER_ADDR");
  EXPECT_THAT(lines_of(kept.out()), ElementsAre("[0] somewhere:"));
}

TEST(HsdpRunTest, TheFirstFailureIsTheStatus) {
  RunningJob code({"-n", "3"}, "[ $RANK != 1 ] || exit 7");
  EXPECT_EQ(code.finish(), 7);
  EXPECT_THAT(code.err(), HasSubstr("rank 1 of 3 exited with code 7"));
  RunningJob signal({"-n", "3"}, "[ $RANK != 2 ] || kill -9 $$");
  EXPECT_EQ(signal.finish(), 128 + 9);
  EXPECT_THAT(signal.err(), HasSubstr("rank 2 of 3 was ended by signal 9 (Killed)"));
}

TEST(HsdpRunTest, OthersMayFinishWithinTheGrace) {
  RunningJob run({"-n", "3", "--grace-s", "20"},
                 "[ $RANK != 0 ] || exit 5; sleep 0.3; echo saved; [ $RANK != 2 ] || exit 6");
  EXPECT_EQ(run.finish(), 5);
  EXPECT_THAT(lines_of(run.out()), UnorderedElementsAre("[1] saved", "[2] saved"));
  EXPECT_THAT(run.err(), HasSubstr("2 ranks have 20 s to finish"));
}

TEST(HsdpRunTest, AfterTheGraceComesSigtermThenSigkill) {
  const auto begin = Clock::now();
  // Rank 1 obeys SIGTERM, rank 2 ignores it; rank 0 fails once both have set their traps.
  RunningJob run({"-n", "3", "--grace-s=0.2"},
                 "case $RANK in 0) exec 3<>$0.fifo; read x <&3; read x <&3; exit 3;; "
                 "1) trap 'echo terminated; exit 0' TERM; echo ready > $0.fifo;; "
                 "2) trap '' TERM; echo ready > $0.fifo;; esac; while :; do sleep 0.05; done",
                 [] {
                   const std::string mark = "/tmp/" + marker();
                   EXPECT_EQ(::mkfifo((mark + ".fifo").c_str(), 0600), 0);
                   return mark;
                 }());
  EXPECT_EQ(run.finish(), 3);
  const std::chrono::duration<double> took = Clock::now() - begin;
  EXPECT_GE(took.count(), 5.2);
  EXPECT_LT(took.count(), 30);
  EXPECT_THAT(run.out(), HasSubstr("[1] terminated\n"));
  EXPECT_THAT(run.err(), AllOf(HasSubstr("sending SIGTERM"), HasSubstr("sending SIGKILL")));
  EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
  ::unlink((run.mark() + ".fifo").c_str());
}

TEST(HsdpRunTest, SignalsGoToAllRanks) {
  for (const int number : {SIGINT, SIGTERM}) {
    RunningJob run(
        {"-n", "3"},
        "trap 'echo got INT; exit 9' INT; trap 'echo got TERM; exit 9' TERM; echo ready; "
        "while :; do sleep 0.02; done");
    ASSERT_TRUE(run.await_lines("ready", 3));
    ::kill(run.pid(), number);
    EXPECT_EQ(run.finish(), 9);
    const std::string got = number == SIGINT ? "got INT" : "got TERM";
    EXPECT_TRUE(run.await_lines(got, 3)) << run.out();
    EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
  }
}

// Grandchildren too, in their rank's group and in other sessions.
constexpr const char* kFamily =
    "sh -c 'sleep 1000; : child' \"$0\" & setsid sh -c 'sleep 1000; : child' \"$0\" & echo ready; ";

TEST(HsdpRunTest, NoOrphansAfterTheEnd) {
  RunningJob run({"-n", "2"}, std::string(kFamily) + "exit 0");
  EXPECT_EQ(run.finish(), 0);
  EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
}

// hsdp_run is two processes: the lower one starts the ranks.
TEST(HsdpRunTest, NoOrphansWhenAHalfOfItIsKilled) {
  for (const bool lower : {false, true}) {
    SCOPED_TRACE(lower ? "lower half" : "upper half");
    RunningJob run({"-n", "2"}, std::string(kFamily) + "sleep 1000");
    ASSERT_TRUE(run.await_lines("ready", 2));
    EXPECT_TRUE(eventually([&] { return processes_with(run.mark()).size() == 8; }));
    const std::string upper = std::to_string(run.pid());
    std::ifstream children("/proc/" + upper + "/task/" + upper + "/children");
    pid_t launcher = 0;
    ASSERT_TRUE(children >> launcher);
    ::kill(lower ? launcher : run.pid(), SIGKILL);
    EXPECT_EQ(run.finish(), lower ? 128 + SIGKILL : 1000 + SIGKILL);
    if (lower) {
      EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
    }
    EXPECT_TRUE(eventually([&] { return processes_with(run.mark()).empty(); }));
  }
}

TEST(HsdpRunTest, TheProgramsOwnOptionsAreItsOwn) {
  RunningJob run({"-n", "1", "--", "printf", "%s ", "-n", "7", "--help", "--", "x"});
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(run.out(), "[0] -n 7 --help -- x \n");
  RunningJob without_dashes({"-n1", "echo", "--grace-s"});
  EXPECT_EQ(without_dashes.finish(), 0);
  EXPECT_EQ(without_dashes.out(), "[0] --grace-s\n");
}

TEST(HsdpRunTest, WrongUsageSaysWhatIsWrong) {
  struct Row {
    std::vector<std::string> arguments;
    int status;
    std::string named;
  };
  const std::vector<Row> rows{
      {{}, 2, "-n N"},
      {{"true"}, 2, "-n N"},
      {{"-n", "2"}, 2, "expected a program to run"},
      {{"-n", "2", "--"}, 2, "expected a program to run"},
      {{"-n", "0", "true"}, 2, "got 0"},
      {{"-n", "-3", "true"}, 2, "got -3"},
      {{"-n", "two", "true"}, 2, "two"},
      {{"-n", "99999", "true"}, 2, "got 99999"},
      {{"-n", "2", "--grace-s", "-1", "true"}, 2, "--grace-s"},
      {{"-n", "2", "--grace-s", "nan", "true"}, 2, "--grace-s"},
      {{"-n", "2", "--grace", "1", "true"}, 2, "grace"},
      {{"-n", "2", "--wrong", "true"}, 2, "--wrong"},
      {{"-n", "2", "/nowhere/program"}, 127, "/nowhere/program"},
      {{"-n", "2", "/etc/passwd"}, 126, "/etc/passwd"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(::testing::PrintToString(row.arguments));
    RunningJob run(row.arguments);
    EXPECT_EQ(run.finish(), row.status);
    EXPECT_THAT(run.err(), HasSubstr(row.named));
    EXPECT_EQ(run.out(), "");
  }
}

TEST(HsdpRunTest, HelpIsComplete) {
  for (const char* flag : {"--help", "-h"}) {
    RunningJob run({flag});
    EXPECT_EQ(run.finish(), 0);
    for (const char* text : {"-n", "--grace-s", "--help", "RANK", "WORLD_SIZE", "HSDP_SECRET",
                             "Exit status", "SIGTERM", "Example"}) {
      EXPECT_THAT(run.out(), HasSubstr(text));
    }
  }
}

}  // namespace
}  // namespace hsdp::test
