// Starts the ranks of one job, prints their output, and ends them when one fails.
#pragma once

#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/comm/unique_fd.h"
#include "hsdp/tools/line_prefixer.h"
#include "hsdp/tools/output_queue.h"
#include "hsdp/tools/rank_process.h"
#include "hsdp/tools/run_options.h"

namespace hsdp::tools {

class RankLauncher {
 public:
  // The signal that ends this process and all its descendants, whatever it is doing.
  static constexpr int kOrphaned = SIGUSR2;

  // The ranks receive `job` and `secret`. Permanently blocks the signals that it handles.
  RankLauncher(RunOptions options, std::string job, std::string secret);

  // Runs the job and returns hsdp_run's exit status. No descendant is left afterwards.
  [[nodiscard]] int run();

 private:
  using Clock = std::chrono::steady_clock;
  // kGone: no rank is left; the remaining output is being written.
  enum class Phase { kRunning, kGrace, kTerminated, kKilled, kGone };

  // One rank's pipe for one of its streams.
  struct Stream {
    comm::UniqueFd source;
    std::size_t target = 0;  // index in outputs_
    LinePrefixer lines;
  };
  struct Rank {
    pid_t pid = -1;
    bool running = false;
  };

  [[nodiscard]] bool start_all();
  void step();
  void handle_signals();
  void reap();
  void report_end(int rank, int wait_status);
  void signal_ranks(int number) const;
  void advance_phase();
  void begin_grace(const std::string& reason);
  void hurry(int number);
  void end_if_orphaned() const;
  void read_stream(Stream& stream);
  void finish_stream(Stream& stream);
  void flush_outputs();
  void drain();
  [[nodiscard]] bool has_output() const;
  [[nodiscard]] int running_count() const;
  [[nodiscard]] int wait_ms() const;
  void say(const std::string& text);

  RunOptions options_;
  std::string job_;
  std::string secret_;
  comm::UniqueFd signals_;
  comm::UniqueFd orphaned_;
  std::vector<Rank> ranks_;
  std::vector<Stream> streams_;
  std::array<OutputQueue, 2> outputs_;  // our standard output and error
  Phase phase_ = Phase::kRunning;
  Clock::time_point phase_end_;
  std::optional<int> status_;  // of the first failure
  // Set once we were told to end or are ending the ranks. We then wait only briefly for a reader
  // that takes nothing; if it misses output, this becomes the exit status.
  std::optional<int> hurried_status_;
  Clock::time_point last_taken_;  // when a reader last took output, or the hurry began
};

}  // namespace hsdp::tools
