#include "hsdp/comm/call_guard.h"

#include <string>

#include "hsdp/error.h"

namespace hsdp::comm {

CallGuard::Entry CallGuard::enter() {
  if (in_forked_child()) {
    throw UsageError({.where = "communicator",
                      .expected = "use in the process that made it",
                      .got = "use in a forked child",
                      .remedy = "connect in the child"});
  }
  if (busy_.exchange(true)) {
    throw UsageError({.where = "communicator",
                      .expected = "one call at a time",
                      .got = "calls by two threads at once",
                      .remedy = "split() a second communicator"});
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
