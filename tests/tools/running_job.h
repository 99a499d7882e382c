// hsdp_run in the background, for tests, and a search for processes that it leaves.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/rendezvous/read_file.h"

namespace hsdp::test {

using Clock = std::chrono::steady_clock;

// A mark in the command line of every process of one test, by which leftovers are found.
inline std::string marker() {
  static int count = 0;
  return "hsdp_run_test_" + std::to_string(::getpid()) + "_" + std::to_string(count++);
}

inline std::vector<pid_t> processes_with(const std::string& mark) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string words = comm::read_file(entry.path() / "cmdline").value_or("");
    if (words.find(mark) != std::string::npos) found.push_back(std::stoi(name));
  }
  return found;
}

inline bool eventually(const std::function<bool()>& holds, double seconds = 10) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (!holds()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

inline std::vector<std::string> lines_of(const std::string& text) {
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

  // Waits until that many lines of output contain the text.
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
          return has_ended();
        },
        30));
    read_all();
    return status_;
  }

  // Reads nothing until the output (1) or the errors (2) stop growing.
  bool await_stall(int fd) {
    int unread = 0;
    auto since = Clock::now();
    return eventually([&] {
      const int before = unread;
      EXPECT_EQ(::ioctl(sources_[static_cast<std::size_t>(fd - 1)], FIONREAD, &unread), 0);
      if (unread == 0 || unread != before) since = Clock::now();
      return Clock::now() - since > std::chrono::milliseconds(300);
    });
  }
  // Waits for its end while nothing reads. Returns the status, or -1 if it is still running.
  int finish_unread(double seconds) {
    eventually([&] { return has_ended(); }, seconds);
    return status_;
  }

 private:
  bool has_ended() {
    int status = 0;
    if (status_ < 0 && ::waitpid(pid_, &status, WNOHANG) == pid_) {
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    }
    return status_ >= 0;
  }
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

}  // namespace hsdp::test
