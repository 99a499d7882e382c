#include "hsdp/reducer/together.h"

#include <exception>
#include <string>
#include <vector>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/control.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"

namespace hsdp::reducer {

void together(Communicator& world, std::string_view what, const std::function<void()>& part) {
  std::exception_ptr own;
  std::string reason;
  try {
    part();
  } catch (const comm::AgreedError& error) {  // the rank that failed tells the others
    if (error.rank() == world.engine()->control().rank()) {
      own = std::current_exception();
      reason = error.reason();
    }
  } catch (const Error& error) {
    own = std::current_exception();
    reason = error.what();
  } catch (const std::exception& error) {
    reason = error.what();
    own = std::make_exception_ptr(Error("reducer: set-up: could not " + std::string(what) + ": " +
                                        reason + " (" +
                                        comm::ranks_text({world.rank()}, world.size()) + ")"));
  }
  if (own && reason.empty()) reason = "an error without a text";
  std::vector<std::string> all;
  try {
    all = world.exchange(reason, what);
  } catch (const MismatchError&) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  if (own) std::rethrow_exception(own);
  for (int r = 0; r < world.size(); ++r) {
    const std::string& theirs = all[static_cast<std::size_t>(r)];
    if (theirs.empty()) continue;
    throw StepAbortedError("reducer: set-up: " + comm::ranks_text({r}, world.size()) +
                               " could not " + std::string(what) + ": " + theirs +
                               "; every rank gave back what it had: mend that, then try again on "
                               "every rank",
                           {world.world_rank(r)});
  }
}

}  // namespace hsdp::reducer
