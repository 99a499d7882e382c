// Writes a JSON line per call and per finding to this process's file in the folder that
// HSDP_NCCL_SHIM_TRACE names, and the first finding of each rule to stderr. tests/gpu/nccl_trace.py
// reads the files of all ranks. Thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "communicators.h"

namespace hsdp::nccl_shim {

struct TracedCall {
  std::string name;                // "send", "all_gather", ...
  int group = 0;                   // calls of one group have one number
  std::optional<int> peer{};       // of a broadcast its root
  std::size_t bytes = 0;           // of a row
  std::optional<int> dtype{};      // ncclDataType_t
  std::optional<int> operation{};  // ncclRedOp_t
  // Whether the memory that the call reads, and writes, is registered; empty where it has none.
  std::optional<bool> in{};
  std::optional<bool> out{};
};

// Before the call is made, so that the last line names a call that hangs.
void trace_call(const Seat& seat, const TracedCall& call);
// Under HSDP_NCCL_SHIM_FATAL=1 this aborts the process.
void report_violation(const std::string& rule, const std::string& text);
void report_note(const std::string& rule, const std::string& text);

}  // namespace hsdp::nccl_shim
