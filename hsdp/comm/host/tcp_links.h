// The TCP connections of a group: one for each pair of its ranks that do not share memory.
//
// Every member listens on its Control's address, tells its port through Control, connects to the
// members before it and admits those after it, all at the same time [Note: links at the first
// call]. Both ends prove a token from that exchange and the job's secret. Strangers on the port are
// dropped; a member that is dropped with them calls again.
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
  const std::vector<int>& neighbours;  // those that need no connection, this rank among them
};

// Collective over the members. Element r is a connected, non-blocking socket to group rank r, empty
// for neighbours. AgreedError on every member when one has no descriptors left for them.
[[nodiscard]] std::vector<UniqueFd> connect_tcp(const TcpLinks& links);

}  // namespace hsdp::comm
