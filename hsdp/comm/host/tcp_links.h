// The TCP connections of a group: one for each pair of ranks that do not share memory.
//
// Every member listens on its Control's address, sends its port through Control, connects to the
// members before it and accepts those after it, all at once [Note: links at the first call]. Both
// ends prove that they know a token from that exchange and the job's secret. Strangers on the port
// are dropped; a member that is dropped with them calls again.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

struct TcpLinks {
  Control& control;
  std::string_view key;                // of the exchange: names the group and the attempt
  const std::vector<int>& members;     // world ranks in group order
  const std::vector<int>& neighbours;  // members that need no connection, including this rank
};

// Collective over the members. Element r is a connected, non-blocking socket to group rank r; empty
// for neighbours. If a member has too few descriptors, every member throws AgreedError.
[[nodiscard]] std::vector<UniqueFd> connect_tcp(const TcpLinks& links);

}  // namespace hsdp::comm
