// What every rank says at the end of a microbatch, finish or discard, over the control connection.
// No later bucket is sent and no result is read before all words are in and agree.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/control.h"

namespace hsdp::reducer {

struct StatusWord {
  std::string call;  // "microbatch", "finish", "discard"
  std::int64_t step = 0;
  std::int64_t microbatch = 0;
  std::string sync;          // MicrobatchPlan::sync_text()
  double divide_factor = 0;  // 0: the default rule
  double loss_scale = 1;
  bool abandoned = false;
  std::string reason;  // of an abandoned block; names the parameter at fault

  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static StatusWord decode(const std::string& bytes);
};

// The first disagreement between the ranks' words as a failure of the world; nothing when they
// agree. `ranks` are the world ranks behind the words.
[[nodiscard]] std::optional<comm::Failure> find_mismatch(std::span<const StatusWord> words,
                                                         std::span<const int> ranks);

// The first rank that abandoned its block, as an index into `words`.
[[nodiscard]] std::optional<int> find_abandoned(std::span<const StatusWord> words);

}  // namespace hsdp::reducer
