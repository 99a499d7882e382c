// hsdp_run as its user meets it: status, output, signals, and no process left behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/rendezvous/read_file.h"

namespace hsdp {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::UnorderedElementsAre;
using Clock = std::chrono::steady_clock;

// A marker in the command line of every process of one test, by which leftovers are found.
std::string marker() {
  static int count = 0;
  return "hsdp_run_test_" + std::to_string(::getpid()) + "_" + std::to_string(count++);
}

std::vector<pid_t> processes_with(const std::string& mark) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string words = comm::read_file(entry.path() / "cmdline").value_or("");
    if (words.find(mark) != std::string::npos) found.push_back(std::stoi(name));
  }
  return found;
}

bool eventually(const std::function<bool()>& holds, double seconds = 10) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (!holds()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// hsdp_run in the background. The script runs in sh and finds the mark as $0.
class RunningJob {
 public:
  RunningJob(const std::vector<std::string>& options, const std::string& script,
             std::string mark = marker())
      : RunningJob(with_script(options, script, mark)) {
    mark_ = std::move(mark);
  }
  explicit RunningJob(const std::vector<std::string>& arguments) {
    std::array<int, 2> out{};
    std::array<int, 2> err{};
    EXPECT_EQ(::pipe2(out.data(), O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(err.data(), O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(err[1], STDERR_FILENO);
      std::vector<char*> words{const_cast<char*>(HSDP_RUN)};
      for (const std::string& word : arguments) words.push_back(const_cast<char*>(word.c_str()));
      words.push_back(nullptr);
      ::execv(HSDP_RUN, words.data());
      ::_exit(99);
    }
    ::close(out[1]);
    ::close(err[1]);
    sources_ = {out[0], err[0]};
    for (const int fd : sources_) ::fcntl(fd, F_SETFL, O_NONBLOCK);
  }
  ~RunningJob() {
    if (status_ < 0) ::kill(pid_, SIGKILL);
    if (status_ < 0) ::waitpid(pid_, nullptr, 0);
    for (const int fd : sources_) ::close(fd);
  }
  RunningJob(const RunningJob&) = delete;
  RunningJob& operator=(const RunningJob&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] const std::string& mark() const { return mark_; }
  [[nodiscard]] const std::string& out() const { return texts_[0]; }
  [[nodiscard]] const std::string& err() const { return texts_[1]; }
  void close_output() { ::close(std::exchange(sources_[0], ::open("/dev/null", O_RDONLY))); }

  // Waits until so many lines of output hold that text.
  bool await_lines(const std::string& text, int count) {
    return eventually([&] {
      read_all();
      const auto lines = lines_of(out());
      return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
               return line.find(text) != std::string::npos;
             }) >= count;
    });
  }

  int finish() {
    EXPECT_TRUE(eventually(
        [&] {
          read_all();
          int status = 0;
          if (status_ < 0 && ::waitpid(pid_, &status, WNOHANG) == pid_) {
            status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
          }
          return status_ >= 0;
        },
        30));
    read_all();
    return status_;
  }

 private:
  static std::vector<std::string> with_script(std::vector<std::string> words,
                                              const std::string& script, const std::string& mark) {
    words.insert(words.end(), {"sh", "-c", script, mark});
    return words;
  }
  void read_all() {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      std::array<char, 65536> bytes{};
      for (ssize_t n = 0; (n = ::read(sources_[i], bytes.data(), bytes.size())) > 0;) {
        texts_[i].append(bytes.data(), static_cast<std::size_t>(n));
      }
    }
  }
  pid_t pid_ = -1;
  int status_ = -1;
  std::string mark_;
  std::array<int, 2> sources_{};
  std::array<std::string, 2> texts_;
};

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

TEST(HsdpRunTest, LinesAreNeverTorn) {
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
  // Rank 1 heeds SIGTERM, rank 2 does not; rank 0 fails when both have their traps.
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
  EXPECT_LT(took.count(), 9);
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

// Grandchildren too, in the group of their rank and in sessions of their own.
constexpr const char* kFamily =
    "sh -c 'sleep 1000; : child' \"$0\" & setsid sh -c 'sleep 1000; : child' \"$0\" & echo ready; ";

TEST(HsdpRunTest, NoOrphansAfterTheEnd) {
  RunningJob run({"-n", "2"}, std::string(kFamily) + "exit 0");
  EXPECT_EQ(run.finish(), 0);
  EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
}

TEST(HsdpRunTest, NoOrphansWhenItIsKilled) {
  RunningJob run({"-n", "2"}, std::string(kFamily) + "sleep 1000");
  ASSERT_TRUE(run.await_lines("ready", 2));
  EXPECT_TRUE(eventually([&] { return processes_with(run.mark()).size() == 8; }));
  ::kill(run.pid(), SIGKILL);
  EXPECT_EQ(run.finish(), 1000 + SIGKILL);
  EXPECT_TRUE(eventually([&] { return processes_with(run.mark()).empty(); }));
}

TEST(HsdpRunTest, NoOrphansWhenItsLowerHalfIsKilled) {
  RunningJob run({"-n", "2"}, std::string(kFamily) + "sleep 1000");
  ASSERT_TRUE(run.await_lines("ready", 2));
  std::ifstream children("/proc/" + std::to_string(run.pid()) + "/task/" +
                         std::to_string(run.pid()) + "/children");
  pid_t launcher = 0;
  children >> launcher;
  ASSERT_GT(launcher, 0);
  ::kill(launcher, SIGKILL);
  EXPECT_EQ(run.finish(), 128 + SIGKILL);
  EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
}

TEST(HsdpRunTest, OutputThatNobodyReadsDoesNotHoldIt) {
  RunningJob run({"-n", "2"}, "while :; do echo line; done");
  ASSERT_TRUE(run.await_lines("line", 2));
  run.close_output();
  EXPECT_NE(run.finish(), 0);
  EXPECT_THAT(processes_with(run.mark()), ::testing::IsEmpty());
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
      {{"-n", "2"}, 2, "which program"},
      {{"-n", "2", "--"}, 2, "which program"},
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
}  // namespace hsdp
