#include "hsdp/comm/call_guard.h"

#include <string>

#include "hsdp/error.h"

namespace hsdp::comm {

CallGuard::Entry CallGuard::enter() {
  if (in_forked_child()) {
    throw UsageError(
        "communicator: used in a forked child: expected the process that made it; connect there");
  }
  if (busy_.exchange(true)) {
    throw UsageError(
        "communicator: used by two threads at the same time: expected one stream at a time; "
        "split() a second communicator");
  }
  return Entry(busy_);
}

void end_world(Control& control, std::string_view engine, const std::exception& error) {
  control.fail({.kind = FailureKind::kAborted,
                .message = std::string(engine) + ": rank " + std::to_string(control.rank()) +
                           " broke off a collective: " + error.what(),
                .ranks = {control.rank()}});
}

}  // namespace hsdp::comm
