// All-reduce of a few bytes in a group that has no links yet: every rank's row travels with its
// call, and every rank adds all rows in rank order. The bits equal those of the other paths.
#pragma once

#include <cstddef>
#include <span>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

// This rank's row for group.agree(); empty if the all-reduce takes another path. All ranks that
// make the same call decide alike.
[[nodiscard]] std::span<const std::byte> control_row(const HostGroup& group, const AllReduce& args);

// Call it after group.agree() with a row. Returns when `args.data` holds the total.
void control_all_reduce(const HostGroup& group, const AllReduce& args);

}  // namespace hsdp::comm
