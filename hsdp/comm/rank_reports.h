// What each rank of a group has to report to the first one, over the control connection. Reports
// look at a job; data goes through collectives.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "hsdp/comm/agreement.h"
#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

using TakeReport = std::function<void(int rank, const Agreement& report)>;

// Collective; use a key once. The first rank calls `take`, which must not throw, with the report of
// each rank in turn, its own first. A rank sends its report, of up to 30 MiB, when its turn has
// come: the first rank holds one at a time. `act` names the wait in errors. Returns once all
// reports are taken.
//
// The timeout of the world applies to each report, not to the wait for a turn.
void report_to_first(Communicator& group, const std::string& key, const Saying& report,
                     std::string_view act, const TakeReport& take);

// The same for long reports: `take` gets each part in turn. `next` fills the calling rank's next
// part, all but `equal`, and returns false if it is the last. It must not throw.
void report_to_first(Communicator& group, const std::string& key,
                     const std::function<bool(Saying& part)>& next, std::string_view act,
                     const TakeReport& take);

}  // namespace hsdp::comm
