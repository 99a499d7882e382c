#include "hsdp/comm/host/host_call.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

namespace hsdp::comm {
namespace {

constexpr std::array<std::string_view, 8> kNames{"reduce_scatter", "all_reduce", "all_gather",
                                                 "all_to_all",     "broadcast",  "barrier",
                                                 "split",          "allocate"};

std::string join(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::size_t votes(std::span<const HostCall> calls, const HostCall& call) {
  return static_cast<std::size_t>(
      std::ranges::count_if(calls, [&](const HostCall& other) { return agrees(call, other); }));
}

}  // namespace

std::string_view name(Operation operation) { return kNames[static_cast<std::size_t>(operation)]; }

std::string bytes_of(const HostCall& call) {
  std::string bytes(sizeof(call), '\0');
  std::memcpy(bytes.data(), &call, sizeof(call));
  return bytes;
}

bool is_call(const HostCall& call) {
  return call.kind == CallKind::kFree || call.kind == CallKind::kPlanned;
}

WaitState wait_in(const HostCall& call, std::string_view act) {
  return {.operation = act.empty() ? name(call.operation) : act, .bucket = call.bucket};
}

bool agrees(const HostCall& a, const HostCall& b) {
  return a.operation == b.operation && a.count == b.count && a.dtype == b.dtype &&
         a.wire == b.wire && a.terms == b.terms && a.bucket == b.bucket && a.root == b.root &&
         a.kind == b.kind;
}

HostCall call_on(Operation operation, ConstTensorView memory, CallLabel label) {
  return {.count = memory.count,
          .bucket = label.bucket,
          .operation = operation,
          .dtype = memory.dtype,
          .wire = memory.dtype,
          .kind = label.planned ? CallKind::kPlanned : CallKind::kFree};
}

std::string to_string(const HostCall& call) {
  std::string text(name(call.operation));
  if (call.operation == Operation::kBarrier || call.operation == Operation::kSplit) return text;
  if (call.operation == Operation::kAllocate) return text + " of " + std::string(name(call.dtype));
  text += " of " + std::to_string(call.count) + " " + std::string(name(call.dtype));
  if (call.wire != call.dtype) text += " sent as " + std::string(name(call.wire));
  if (call.operation == Operation::kBroadcast) text += " from rank " + std::to_string(call.root);
  if (call.bucket >= 0) text += " of bucket " + std::to_string(call.bucket);
  return text;
}

Failure mismatch(std::span<const HostCall> calls, std::span<const int> members,
                 std::string_view engine) {
  std::size_t expected = 0;
  for (std::size_t r = 1; r < calls.size(); ++r) {
    if (votes(calls, calls[r]) > votes(calls, calls[expected])) expected = r;
  }
  std::size_t other = calls.size();
  std::vector<int> right;
  std::vector<int> wrong;
  for (std::size_t r = 0; r < calls.size(); ++r) {
    const bool same = agrees(calls[r], calls[expected]);
    (same ? right : wrong).push_back(members[r]);
    if (!same && other == calls.size()) other = r;
  }
  const std::string first = to_string(calls[expected]);
  const std::string second = to_string(calls[other]);
  std::string message = std::string(engine) + ": the ranks' calls do not match: expected " + first +
                        " (" + join(right) + "), got " + second;
  if (first == second)
    message += " with another cut, exponent or divisor (layouts, divide factors, loss scales?)";
  message += " (" + join(wrong) + "); make the same calls in the same order on every rank";
  return {.kind = FailureKind::kMismatch, .message = std::move(message), .ranks = std::move(wrong)};
}

}  // namespace hsdp::comm
