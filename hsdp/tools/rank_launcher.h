// Starts the ranks of one job, prints what they print, and ends them when one fails.
#pragma once

#include <chrono>
#include <csignal>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/unique_fd.h"
#include "hsdp/tools/line_prefixer.h"
#include "hsdp/tools/rank_process.h"
#include "hsdp/tools/run_options.h"

namespace hsdp::tools {

class RankLauncher {
 public:
  // Ends everything below this process and the process itself, whatever it is doing.
  static constexpr int kOrphaned = SIGUSR2;

  // `job` and `secret` go to the ranks. Blocks the signals that it handles, for good.
  RankLauncher(RunOptions options, std::string job, std::string secret);

  // Runs the job; the exit status for hsdp_run. No descendant is left.
  [[nodiscard]] int run();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { kRunning, kGrace, kTerminated, kKilled };

  // One pipe of one rank.
  struct Stream {
    comm::UniqueFd source;
    int target = -1;  // our standard output or error
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
  void print(const Stream& stream, const std::string& text);
  bool write_all(int fd, std::string_view text) const;
  void end_if_orphaned() const;
  void read_stream(Stream& stream);
  void drain();
  [[nodiscard]] int running_count() const;
  [[nodiscard]] int wait_ms() const;
  void say(const std::string& text) const;

  RunOptions options_;
  std::string job_;
  std::string secret_;
  comm::UniqueFd signals_;
  comm::UniqueFd orphaned_;
  std::vector<Rank> ranks_;
  std::vector<Stream> streams_;
  Phase phase_ = Phase::kRunning;
  Clock::time_point phase_end_;
  std::optional<int> status_;  // of the first failure
};

}  // namespace hsdp::tools
