// The TCP connections of a group: one for each pair of its ranks that do not share memory.
//
// Every member listens on its Control's address, tells its port through Control, and connects to
// the members before it. Connections prove a token from that exchange, and the job's secret when
// there is one; strangers on the port are dropped, slow ones hold up nobody.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

struct TcpLinks {
  Control& control;
  const std::string& group_id;
  const std::vector<int>& members;     // world ranks in group order
  const std::vector<int>& neighbours;  // those that need no connection, this rank among them
};

// Collective over the members. Element r is a connected, non-blocking socket to group rank r, empty
// for neighbours.
[[nodiscard]] std::vector<UniqueFd> connect_tcp(const TcpLinks& links);

}  // namespace hsdp::comm
