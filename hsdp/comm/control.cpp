#include "hsdp/comm/control.h"

#include "hsdp/error.h"

namespace hsdp::comm {

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
