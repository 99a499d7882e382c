#include "hsdp/comm/control.h"

#include <numeric>

#include "hsdp/comm/operation_record.h"
#include "hsdp/error.h"

namespace hsdp::comm {

std::optional<std::vector<std::string>> Control::exchange_while_open(std::string_view key,
                                                                     std::string_view message,
                                                                     WaitState waiting) {
  std::vector<int> everyone(static_cast<std::size_t>(size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return exchange(key, everyone, message, waiting);
}

std::shared_ptr<OperationRecord> Control::operations() {
  std::call_once(has_operations_, [this] { operations_ = std::make_shared<OperationRecord>(); });
  return operations_;
}

void require_other_rank(int peer, int rank, int size) {
  if (peer >= 0 && peer < size && peer != rank) return;
  throw UsageError({.where = "control: tell",
                    .expected = "another world rank",
                    .got = std::to_string(peer) + " (rank " + std::to_string(rank) + " of " +
                           std::to_string(size) + ")"});
}

void throw_failure(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kPeerLost:
      throw PeerLostError(failure.message, failure.ranks);
    case FailureKind::kTimeout:
      throw TimeoutError(failure.message, failure.ranks);
    case FailureKind::kMismatch:
      throw MismatchError(failure.message, failure.ranks);
    case FailureKind::kAborted:
      break;
  }
  throw RankError(failure.message, failure.ranks);
}

}  // namespace hsdp::comm
