// A child process whose output (stdout and stderr together) is read line by line.
//
// Not thread-safe. The child gets SIGTERM if this process dies or the Job is destroyed first. Every
// wait is bounded: past the limit, every call throws std::runtime_error with the end of the output.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace examples {

struct JobCommand {
  std::vector<std::string> arguments;                            // the program first, with its path
  std::vector<std::pair<std::string, std::string>> environment;  // added to ours
};

struct JobOutcome {
  int status = 0;  // as a shell reports it: 128 + n for signal n
  std::string output;
  double seconds = 0;
};

class Job {
 public:
  Job(const JobCommand& command, std::chrono::seconds limit);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Without its line feed; nothing once the output has ended.
  [[nodiscard]] std::optional<std::string> next_line();
  // Reads the rest and waits for the end.
  JobOutcome wait();

 private:
  void expect_in_time() const;
  bool read_some();

  std::string name_;
  pid_t pid_ = -1;
  int output_fd_ = -1;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point deadline_;
  std::string output_;
  std::size_t line_begin_ = 0;
};

// Runs the command to its end; throws, with the end of the output, on any other status.
JobOutcome run_job(const JobCommand& command, int expected_status = 0);

}  // namespace examples
