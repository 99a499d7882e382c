#include "examples/demo/job.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace examples {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr std::chrono::seconds kLimit = 120s;

std::string tail_of(const std::string& output) {
  constexpr std::size_t kTail = 1500;
  return output.size() <= kTail ? output : "..." + output.substr(output.size() - kTail);
}

[[noreturn]] void become(const JobCommand& command, int output_fd) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  dup2(output_fd, STDOUT_FILENO);
  dup2(output_fd, STDERR_FILENO);
  const int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(null_fd, STDIN_FILENO);
  for (const auto& [name, value] : command.environment) {
    setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<char*> arguments;
  for (const std::string& argument : command.arguments) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  execv(arguments[0], arguments.data());
  const std::string message = "cannot run " + command.arguments[0] + "\n";
  static_cast<void>(!write(STDERR_FILENO, message.data(), message.size()));
  _exit(127);
}

}  // namespace

Job::Job(const JobCommand& command, std::chrono::seconds limit)
    : name_(std::filesystem::path(command.arguments.at(0)).filename().string()),
      start_(Clock::now()),
      deadline_(start_ + limit) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "job: pipe");
  }
  pid_ = fork();
  if (pid_ == 0) {
    become(command, ends[1]);
  }
  close(ends[1]);
  output_fd_ = ends[0];
  if (pid_ < 0) {
    close(output_fd_);
    throw std::system_error(errno, std::generic_category(), "job: fork");
  }
}

Job::~Job() {
  close(output_fd_);
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    for (int i = 0; i < 100 && waitpid(pid_, nullptr, WNOHANG) == 0; ++i) {
      std::this_thread::sleep_for(100ms);
    }
  }
}

void Job::expect_in_time() const {
  if (Clock::now() >= deadline_) {
    throw std::runtime_error(name_ + ": did not end in time; it printed:\n" + tail_of(output_));
  }
}

// False at the end of the output.
bool Job::read_some() {
  pollfd waited{.fd = output_fd_, .events = POLLIN, .revents = 0};
  while (poll(&waited, 1, 200) <= 0) {
    expect_in_time();
  }
  std::array<char, 4096> buffer{};
  const ssize_t count = read(output_fd_, buffer.data(), buffer.size());
  if (count > 0) {
    output_.append(buffer.data(), static_cast<std::size_t>(count));
  }
  return count > 0;
}

std::optional<std::string> Job::next_line() {
  std::size_t end = output_.find('\n', line_begin_);
  while (end == std::string::npos && read_some()) {
    end = output_.find('\n', line_begin_);
  }
  if (end == std::string::npos && line_begin_ == output_.size()) {
    return std::nullopt;
  }
  end = std::min(end, output_.size());
  std::string line = output_.substr(line_begin_, end - line_begin_);
  line_begin_ = std::min(end + 1, output_.size());
  return line;
}

JobOutcome Job::wait() {
  while (read_some()) {
  }
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    expect_in_time();
    std::this_thread::sleep_for(2ms);
  }
  pid_ = -1;
  return {.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
          .output = output_,
          .seconds = std::chrono::duration<double>(Clock::now() - start_).count()};
}

JobOutcome run_job(const JobCommand& command, int expected_status) {
  JobOutcome outcome = Job(command, kLimit).wait();
  if (outcome.status != expected_status) {
    std::string line;
    for (const std::string& argument : command.arguments) {
      line += argument + " ";
    }
    throw std::runtime_error(line + "ended with status " + std::to_string(outcome.status) +
                             "; it printed:\n" + tail_of(outcome.output));
  }
  return outcome;
}

}  // namespace examples
