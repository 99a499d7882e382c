// Runs a function in `size` forked processes with the environment that hsdp_run sets, so that
// connect_world() works inside, and collects how each of them ended.
//
// Every child dies with the test, and has a process group that is killed at the end. At the
// deadline it is killed (RankOutcome::overran). Fork from a single-threaded test.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace hsdp::test {

struct RankOutcome {
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
  bool overran = false;            // killed by the test at the deadline
  std::vector<std::string> notes;  // what the rank noted, in order
  std::string error;               // what() of the exception that left the function, if any
  double seconds = 0;              // from the start of the first rank to the end of this one
  [[nodiscard]] bool ok() const { return exit_code == 0 && !overran; }
};

struct ProcessOptions {
  std::chrono::milliseconds deadline{30'000};
  std::map<std::string, std::string> environment;  // on top of RANK, WORLD_SIZE, HSDP_JOB, ...
  std::function<void(int rank)> before;            // called first in the child (namespaces)
};

// In a child: sends one line to the test, which sees it at once.
void note(const std::string& line);

class ProcessRanks {
 public:
  // If `run` throws, the exit code is 100 and RankOutcome::error has the message.
  ProcessRanks(int size, ProcessOptions options, std::function<int(int rank)> run);
  ~ProcessRanks();  // kills what is left
  ProcessRanks(const ProcessRanks&) = delete;
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  // Waits until the rank has noted that line; false at the deadline, or when it ended without it.
  bool wait_for_note(int rank, const std::string& line);
  // Waits until a signal has stopped the rank: a SIGCONT sent earlier would be lost.
  bool wait_until_stopped(int rank);
  // Waits until the rank has ended; false at the deadline.
  bool wait_for_end(int rank) { return wait_for_end_of_one({rank}); }
  bool wait_for_end_of_one(const std::vector<int>& ranks);
  void signal(int rank, int number) const;
  [[nodiscard]] pid_t pid(int rank) const { return children_[static_cast<size_t>(rank)].pid; }
  // Waits for all; a rank that overruns is killed.
  std::vector<RankOutcome> finish();

 private:
  struct Child {
    pid_t pid = -1;
    int notes_fd = -1;
    bool running = false;
    std::string unfinished_line;
    RankOutcome outcome;
  };
  [[noreturn]] void run_child(int rank, int notes_fd, const std::function<int(int)>& run) const;
  void read_notes(Child& child);
  void poll_children();
  [[nodiscard]] bool past_deadline() const;

  ProcessOptions options_;
  std::string job_;
  std::chrono::steady_clock::time_point start_;
  std::vector<Child> children_;
};

inline std::vector<RankOutcome> run_processes(int size, ProcessOptions options,
                                              std::function<int(int rank)> run) {
  return ProcessRanks(size, std::move(options), std::move(run)).finish();
}

}  // namespace hsdp::test
