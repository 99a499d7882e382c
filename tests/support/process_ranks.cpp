#include "tests/support/process_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace hsdp::test {
namespace {

constexpr int kExceptionCode = 100;
constexpr char kErrorMark = '\x01';
int child_notes_fd = -1;

void write_all(int fd, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n <= 0) return;
    done += static_cast<std::size_t>(n);
  }
}

std::string next_job() {
  static std::atomic<int> count{0};
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
}

void set_variable(const std::string& name, const std::string& value) {
  ::setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace

void note(const std::string& line) { write_all(child_notes_fd, line + "\n"); }

ProcessRanks::ProcessRanks(int size, ProcessOptions options, std::function<int(int rank)> run)
    : options_(std::move(options)),
      job_(next_job()),
      start_(std::chrono::steady_clock::now()),
      children_(static_cast<std::size_t>(size)) {
  for (int rank = 0; rank < size; ++rank) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    Child& child = children_[static_cast<std::size_t>(rank)];
    child.pid = ::fork();
    if (child.pid < 0) throw std::runtime_error("fork");
    if (child.pid == 0) {
      ::close(ends[0]);
      for (int earlier = 0; earlier < rank; ++earlier) {
        ::close(children_[static_cast<std::size_t>(earlier)].notes_fd);
      }
      run_child(rank, ends[1], run);
    }
    ::close(ends[1]);
    ::setpgid(child.pid, child.pid);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    child.notes_fd = ends[0];
    child.running = true;
  }
}

void ProcessRanks::run_child(int rank, int notes_fd, const std::function<int(int)>& run) const {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::setpgid(0, 0);
  child_notes_fd = notes_fd;
  int code = kExceptionCode;
  try {
    set_variable("RANK", std::to_string(rank));
    set_variable("WORLD_SIZE", std::to_string(children_.size()));
    set_variable("LOCAL_RANK", std::to_string(rank));
    set_variable("LOCAL_WORLD_SIZE", std::to_string(children_.size()));
    set_variable("HSDP_JOB", job_);
    for (const auto& [name, value] : options_.environment) set_variable(name, value);
    if (options_.before) options_.before(rank);
    code = run(rank);
  } catch (const std::exception& error) {
    note(kErrorMark + std::string(error.what()));
  }
  ::_exit(code);
}

ProcessRanks::~ProcessRanks() {
  for (Child& child : children_) {
    if (child.pid > 0) ::kill(-child.pid, SIGKILL);
    if (child.running) ::waitpid(child.pid, nullptr, 0);
    if (child.notes_fd >= 0) ::close(child.notes_fd);
  }
}

void ProcessRanks::read_notes(Child& child) {
  std::array<char, 4096> bytes{};
  for (;;) {
    const ssize_t n = ::read(child.notes_fd, bytes.data(), bytes.size());
    if (n <= 0) return;
    for (const char c : std::string(bytes.data(), static_cast<std::size_t>(n))) {
      if (c != '\n') {
        child.unfinished_line += c;
      } else if (child.unfinished_line.starts_with(kErrorMark)) {
        child.outcome.error = child.unfinished_line.substr(1);
        child.unfinished_line.clear();
      } else {
        child.outcome.notes.push_back(std::exchange(child.unfinished_line, {}));
      }
    }
  }
}

void ProcessRanks::poll_children() {
  std::vector<pollfd> ends;
  for (const Child& child : children_) {
    if (child.running) ends.push_back({child.notes_fd, POLLIN, 0});
  }
  ::poll(ends.data(), ends.size(), 5);
  for (Child& child : children_) {
    if (!child.running) continue;
    int status = 0;
    const bool ended = ::waitpid(child.pid, &status, WNOHANG) == child.pid;
    read_notes(child);
    if (!ended) continue;
    child.running = false;
    child.outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    child.outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    child.outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
}

bool ProcessRanks::past_deadline() const {
  return std::chrono::steady_clock::now() - start_ > options_.deadline;
}

bool ProcessRanks::wait_for_note(int rank, const std::string& line) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  for (;;) {
    const auto& notes = child.outcome.notes;
    if (std::find(notes.begin(), notes.end(), line) != notes.end()) return true;
    if (!child.running || past_deadline()) return false;
    poll_children();
  }
}

bool ProcessRanks::wait_until_stopped(int rank) {
  const std::string path = "/proc/" + std::to_string(pid(rank)) + "/stat";
  while (!past_deadline()) {
    std::ifstream file(path);
    std::string text;
    std::getline(file, text);
    const std::size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) return false;
    if (text.compare(name_end, 3, ") T") == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

bool ProcessRanks::wait_for_end_of_one(const std::vector<int>& ranks) {
  const auto has_ended = [this](int rank) {
    return !children_[static_cast<std::size_t>(rank)].running;
  };
  while (!std::ranges::any_of(ranks, has_ended)) {
    if (past_deadline()) return false;
    poll_children();
  }
  return true;
}

void ProcessRanks::signal(int rank, int number) const { ::kill(pid(rank), number); }

std::vector<RankOutcome> ProcessRanks::finish() {
  const auto running = [](const Child& child) { return child.running; };
  while (std::any_of(children_.begin(), children_.end(), running)) {
    if (past_deadline()) {
      for (Child& child : children_) {
        if (!child.running) continue;
        child.outcome.overran = true;
        ::kill(-child.pid, SIGKILL);
        ::kill(child.pid, SIGKILL);
      }
    }
    poll_children();
  }
  std::vector<RankOutcome> outcomes;
  for (const Child& child : children_) outcomes.push_back(child.outcome);
  return outcomes;
}

}  // namespace hsdp::test
