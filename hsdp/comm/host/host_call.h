// What a rank is about to do in a group: posted and compared before any data moves.
//
// Plain data. With its sequence number it fills one cache line. Any rank of the group can read it
// from memory or as bytes from a socket (all ranks have the same architecture).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/control.h"
#include "hsdp/dtype.h"
#include "hsdp/row_cut.h"
#include "hsdp/tensor_view.h"

namespace hsdp::comm {

enum class Operation : std::uint8_t {
  kReduceScatter,
  kAllReduce,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kBarrier,
  kSplit,
  kAllocate
};
[[nodiscard]] std::string_view name(Operation operation);

// HostCall::part for empty memory: peers have nothing to read.
constexpr std::uint32_t kNoBytes = 0xffffffffU;

// Unlikely values for data.
enum class CallKind : std::uint32_t {
  kFree = 0x6b1d94f3,
  kPlanned = 0x9c47a2e5,  // see CallLabel
};

struct HostCall {
  std::int64_t count = 0;
  std::uint64_t terms = 0;    // hash of what else must agree: cut, exponents, divisor
  std::uint64_t offset = 0;   // of the posted memory, in its part
  std::uint32_t part = 0;     // of this rank's shared memory; 0: private memory
  std::uint32_t dropped = 0;  // number of parts this rank has freed so far
  std::int32_t bucket = -1;
  std::int32_t root = 0;
  Operation operation = Operation::kBarrier;
  Dtype dtype = Dtype::kU8;
  Dtype wire = Dtype::kU8;
  std::uint8_t wants_nonfinite = 0;
  CallKind kind = CallKind::kFree;
};
static_assert(sizeof(HostCall) == 48);

// The call for one array that travels in its own dtype and that no peer accesses.
[[nodiscard]] HostCall call_on(Operation operation, ConstTensorView memory, CallLabel label = {});

[[nodiscard]] std::string bytes_of(const HostCall& call);
// False for data that a peer sent instead, because it did not compare the call.
[[nodiscard]] bool is_call(const HostCall& call);

// The name of a wait in it for errors; for `act` see CallLabel.
[[nodiscard]] WaitState wait_in(const HostCall& call, std::string_view act = {});

// Whether two ranks make the same call.
[[nodiscard]] bool agrees(const HostCall& a, const HostCall& b);
[[nodiscard]] std::string to_string(const HostCall& call);

// The failure that names both calls and their ranks. The minority is at fault; in a tie, the ranks
// that differ from the lowest rank. `members` are the world ranks of `calls`.
[[nodiscard]] Failure mismatch(std::span<const HostCall> calls, std::span<const int> members,
                               std::string_view engine = "host");

// Order-dependent hash for HostCall::terms.
class TermsHash {
 public:
  TermsHash& add(std::uint64_t value) {
    value_ = (value_ ^ value) * 0x9e3779b97f4a7c15ULL;
    value_ ^= value_ >> 29;
    return *this;
  }
  TermsHash& add(const RowCut& cut) {
    for (const std::int64_t offset : cut.offsets()) add(static_cast<std::uint64_t>(offset));
    return *this;
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0x243f6a8885a308d3ULL;
};

}  // namespace hsdp::comm
