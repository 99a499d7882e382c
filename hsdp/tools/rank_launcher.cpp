#include "hsdp/tools/rank_launcher.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "hsdp/tools/descendants.h"

namespace hsdp::tools {
namespace {

constexpr std::chrono::seconds kKillDelay{5};
constexpr std::chrono::seconds kReaderPatience{2};
constexpr std::size_t kOutput = 0;
constexpr std::size_t kErrors = 1;
constexpr int kNotExecutable = 126;
constexpr int kNotFound = 127;
constexpr int kSignalBase = 128;
constexpr std::array kHandled{SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT};

template <typename Numbers>
comm::UniqueFd open_signals(const Numbers& numbers) {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : numbers) ::sigaddset(&set, number);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  return comm::UniqueFd(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
}

std::string seconds(std::chrono::milliseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

}  // namespace

RankLauncher::RankLauncher(RunOptions options, std::string job, std::string secret)
    : options_(std::move(options)),
      job_(std::move(job)),
      secret_(std::move(secret)),
      signals_(open_signals(kHandled)),
      orphaned_(open_signals(std::array{kOrphaned})),
      outputs_{OutputQueue(STDOUT_FILENO), OutputQueue(STDERR_FILENO)} {
  ::signal(SIGPIPE, SIG_IGN);
}

void RankLauncher::end_if_orphaned() const {
  signalfd_siginfo info{};
  if (::read(orphaned_.get(), &info, sizeof info) != sizeof info) return;
  kill_descendants();
  ::_exit(1);
}

void RankLauncher::say(const std::string& text) {
  outputs_[kErrors].push("hsdp_run: " + text + "\n");
}

bool RankLauncher::start_all() {
  for (int rank = 0; rank < options_.rank_count; ++rank) {
    RankProcess process = start_rank({options_.command, rank, options_.rank_count, job_, secret_});
    if (process.exec_error != 0) {
      say("cannot run '" + options_.command.front() + "': " + std::strerror(process.exec_error));
      status_ = process.exec_error == ENOENT ? kNotFound : kNotExecutable;
      return false;
    }
    const std::string prefix = "[" + std::to_string(rank) + "] ";
    ranks_.push_back({process.pid, true});
    streams_.push_back({std::move(process.output), kOutput, LinePrefixer(prefix)});
    streams_.push_back({std::move(process.errors), kErrors, LinePrefixer(prefix)});
  }
  return true;
}

int RankLauncher::run() {
  if (start_all()) {
    while (running_count() > 0) step();
  }
  kill_descendants();
  for (Rank& rank : ranks_) rank.running = false;
  drain();
  return status_.value_or(0);
}

int RankLauncher::running_count() const {
  return static_cast<int>(
      std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; }));
}

int RankLauncher::wait_ms() const {
  Clock::time_point end = phase_end_;
  if (phase_ == Phase::kGone) end = last_taken_ + kReaderPatience;
  const bool has_end = phase_ == Phase::kGrace || phase_ == Phase::kTerminated ||
                       (phase_ == Phase::kGone && hurried_status_);
  if (!has_end) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
  constexpr std::int64_t kLongestMs = 60'000;
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, kLongestMs));
}

void RankLauncher::step() {
  std::vector<pollfd> ready{{signals_.get(), POLLIN, 0}, {orphaned_.get(), POLLIN, 0}};
  for (const OutputQueue& output : outputs_) {
    if (!output.is_empty()) ready.push_back({output.fd(), POLLOUT, 0});
  }
  const std::size_t first_source = ready.size();
  std::vector<std::size_t> sources;
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    // Ranks wait for a slow reader, as if they wrote to its pipe themselves.
    if (!streams_[i].source || outputs_[streams_[i].target].is_full()) continue;
    ready.push_back({streams_[i].source.get(), POLLIN, 0});
    sources.push_back(i);
  }
  // No writer is left: a source with nothing to read now has ended.
  const bool all_written = phase_ == Phase::kGone && !sources.empty();
  ::poll(ready.data(), ready.size(), all_written ? 0 : wait_ms());
  if (ready[1].revents != 0) end_if_orphaned();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (all_written || ready[first_source + i].revents != 0) read_stream(streams_[sources[i]]);
  }
  if (ready[0].revents != 0) handle_signals();
  advance_phase();
  flush_outputs();
}

void RankLauncher::handle_signals() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) continue;
    hurry(number);
    if (phase_ == Phase::kGone) continue;
    signal_ranks(number);
    begin_grace(std::string("passed on signal ") + ::strsignal(number));
  }
  reap();
}

void RankLauncher::hurry(int number) {
  if (hurried_status_) return;
  hurried_status_ = kSignalBase + number;
  last_taken_ = Clock::now();
}

void RankLauncher::reap() {
  int wait_status = 0;
  for (pid_t pid = 0; (pid = ::waitpid(-1, &wait_status, WNOHANG)) > 0;) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].pid != pid) continue;
      ranks_[rank].running = false;
      report_end(static_cast<int>(rank), wait_status);
    }
  }
}

void RankLauncher::report_end(int rank, int wait_status) {
  if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0) return;
  std::string how = "rank " + std::to_string(rank) + " of " + std::to_string(ranks_.size());
  int status = 0;
  if (WIFSIGNALED(wait_status)) {
    const int number = WTERMSIG(wait_status);
    how += " was ended by signal " + std::to_string(number) + " (" + ::strsignal(number) + ")";
    status = kSignalBase + number;
  } else {
    status = WEXITSTATUS(wait_status);
    how += " exited with code " + std::to_string(status);
  }
  if (!status_) status_ = status;
  // A rank that we are ending has not failed.
  if (phase_ == Phase::kTerminated || phase_ == Phase::kKilled) return;
  begin_grace(how);
}

void RankLauncher::begin_grace(const std::string& reason) {
  const int others = running_count();
  std::string text = reason;
  if (phase_ == Phase::kRunning && others > 0) {
    phase_ = Phase::kGrace;
    phase_end_ = Clock::now() + options_.grace;
    text += "; " + std::to_string(others) + (others == 1 ? " rank has " : " ranks have ") +
            seconds(options_.grace) + " to finish";
  }
  say(text);
}

void RankLauncher::advance_phase() {
  if (running_count() == 0 || Clock::now() < phase_end_) return;
  const std::string left = std::to_string(running_count()) + " still running: ";
  if (phase_ == Phase::kGrace) {
    say(left + "sending SIGTERM");
    signal_ranks(SIGTERM);
    signal_ranks(SIGCONT);  // a stopped rank must act on the signal, too
    hurry(SIGTERM);
    phase_ = Phase::kTerminated;
    phase_end_ = Clock::now() + kKillDelay;
  } else if (phase_ == Phase::kTerminated) {
    say(left + "sending SIGKILL");
    signal_ranks(SIGKILL);
    phase_ = Phase::kKilled;
  }
}

void RankLauncher::signal_ranks(int number) const {
  for (const Rank& rank : ranks_) {
    if (rank.running) ::kill(-rank.pid, number);
  }
}

// Reads once, so that a rank that never stops printing does not keep us from the signals.
void RankLauncher::read_stream(Stream& stream) {
  std::array<char, 1U << 16U> bytes{};
  const ssize_t n = ::read(stream.source.get(), bytes.data(), bytes.size());
  if (n > 0) {
    outputs_[stream.target].push(stream.lines.feed({bytes.data(), static_cast<std::size_t>(n)}));
  } else if (n == 0 || (errno != EINTR && errno != EAGAIN) || phase_ == Phase::kGone) {
    finish_stream(stream);
  }
}

void RankLauncher::finish_stream(Stream& stream) {
  stream.source.reset();
  outputs_[stream.target].push(stream.lines.finish());
}

void RankLauncher::flush_outputs() {
  for (OutputQueue& output : outputs_) {
    if (output.flush()) last_taken_ = Clock::now();
  }
  // No one reads our output any more: close the ranks' pipes, too.
  for (Stream& stream : streams_) {
    if (outputs_[stream.target].is_closed()) stream.source.reset();
  }
}

bool RankLauncher::has_output() const {
  return std::any_of(outputs_.begin(), outputs_.end(),
                     [](const OutputQueue& output) { return !output.is_empty(); }) ||
         std::any_of(streams_.begin(), streams_.end(),
                     [](const Stream& stream) { return static_cast<bool>(stream.source); });
}

// Waits for a live reader for as long as it takes, unless we are in a hurry.
void RankLauncher::drain() {
  phase_ = Phase::kGone;
  last_taken_ = Clock::now();
  while (has_output()) {
    step();
    if (!hurried_status_ || Clock::now() < last_taken_ + kReaderPatience) continue;
    if (!has_output()) return;
    say("nobody takes the output: the rest of it is lost");
    flush_outputs();
    if (!status_) status_ = hurried_status_;
    return;
  }
}

}  // namespace hsdp::tools
