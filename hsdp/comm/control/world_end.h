// The pure judgement that rank 0 makes of what all ranks report [Note: who is at fault].
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
  // For each wait: the ranks that it waits for (its peer, or who is missing in its exchange).
  // Empty: unknown.
  std::vector<std::vector<int>> awaited;
  int parent = 0;  // through which rank it speaks: 0, it does itself
};

// A rank that is silent for `timeout`, or the end of the chain of waits that starts at a wait older
// than `timeout`: rank 1 waits for 2, 2 waits for 3, and 3 waits for nobody, so 3 is at fault.
[[nodiscard]] std::optional<WorldEnd> judge(const std::vector<RankReport>& reports,
                                            std::chrono::milliseconds timeout);

// "rank 2 of 4", "ranks 1, 2 of 4".
[[nodiscard]] std::string ranks_text(const std::vector<int>& ranks, int size);
// "0.31 s"
[[nodiscard]] std::string seconds_text(std::chrono::milliseconds time);
// "all_reduce of bucket 3"
[[nodiscard]] std::string operation_text(std::string_view operation, int bucket);

[[nodiscard]] WorldEnd end_by_loss(int rank, int size, const std::string& reason);
// It said what it may not say.
[[nodiscard]] WorldEnd end_by_mismatch(int rank, const std::string& message);
[[nodiscard]] WorldEnd end_by_malformed(const std::string& what, int rank);
[[nodiscard]] WorldEnd end_by_second_use(const std::string& key, int rank);
// The control plane's own error on that rank.
[[nodiscard]] WorldEnd end_by_error(int rank, const std::exception& error);

}  // namespace hsdp::comm
