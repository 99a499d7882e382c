// What each rank of a group has to report to the first one, over the control connection. For looks
// at a job; data goes through collectives.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "hsdp/comm/agreement.h"
#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

// Collective; use a key once. On the first rank calls `take`, which must not throw, with the report
// of each rank in turn, its own first. A rank sends its report, of up to 30 MiB, when its turn has
// come: the first rank holds one at a time. `act` names the wait in errors.
void report_to_first(Communicator& group, const std::string& key, const Saying& report,
                     std::string_view act,
                     const std::function<void(int rank, const Agreement& report)>& take);

}  // namespace hsdp::comm
