// Rank 0's judgement, a pure function of what all ranks report [Note: who is at fault].
#pragma once

#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/comm/control/control_frames.h"

namespace hsdp::comm {

struct RankReport {
  bool closed = false;                  // said goodbye
  std::chrono::milliseconds silent{0};  // since its last sign of life
  std::vector<BeatWait> waits;          // oldest first
  // For each wait: the ranks it waits for (its peer, or those missing in its exchange). Empty:
  // unknown.
  std::vector<std::vector<int>> awaited;
  int parent = 0;  // the rank it speaks through; 0: it speaks for itself
};

// Finds a rank that is silent for `timeout`, or the end of the chain of waits from a wait older
// than `timeout`: if rank 1 waits for 2, 2 for 3, and 3 for no rank, then 3 is at fault.
[[nodiscard]] std::optional<WorldEnd> judge(const std::vector<RankReport>& reports,
                                            std::chrono::milliseconds timeout);

// "rank 2 of 4", "ranks 1, 2 of 4".
[[nodiscard]] std::string ranks_text(const std::vector<int>& ranks, int size);
// "0.31 s"
[[nodiscard]] std::string seconds_text(std::chrono::milliseconds time);
// "all_reduce of bucket 3"
[[nodiscard]] std::string operation_text(std::string_view operation, int bucket);

[[nodiscard]] WorldEnd end_by_loss(int rank, int size, const std::string& reason);
// The rank sent something that it must not send.
[[nodiscard]] WorldEnd end_by_mismatch(int rank, const std::string& message);
[[nodiscard]] WorldEnd end_by_malformed(const std::string& what, int rank);
[[nodiscard]] WorldEnd end_by_second_use(const std::string& key, int rank);
// The control plane failed on that rank.
[[nodiscard]] WorldEnd end_by_error(int rank, const std::exception& error);

}  // namespace hsdp::comm
