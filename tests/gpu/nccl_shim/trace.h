// Writes a JSON line for each call and each finding to this process's file in the folder
// HSDP_NCCL_SHIM_TRACE, and the first finding of each rule to stderr. tests/gpu/nccl_trace.py reads
// the files of all ranks. Thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "communicators.h"

namespace hsdp::nccl_shim {

struct TracedCall {
  std::string name;                // "send", "all_gather", ...
  int group = 0;                   // the same for all calls of a group
  std::optional<int> peer{};       // for a broadcast, the root
  std::size_t bytes = 0;           // per row
  std::optional<int> dtype{};      // ncclDataType_t
  std::optional<int> operation{};  // ncclRedOp_t
  // Whether the memory that the call reads and the memory that it writes are registered; empty if
  // there is none.
  std::optional<bool> in{};
  std::optional<bool> out{};
};

// Call it before the traced call, so that the last line names a call that hangs.
void trace_call(const Seat& seat, const TracedCall& call);
// With HSDP_NCCL_SHIM_FATAL=1 it aborts the process.
void report_violation(const std::string& rule, const std::string& text);
void report_note(const std::string& rule, const std::string& text);

}  // namespace hsdp::nccl_shim
