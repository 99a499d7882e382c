// What the tests of the MPI engine share. The program is started by mpirun: every rank runs every
// test, in the same order.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "hsdp/comm/world.h"

namespace hsdp::test {

// The launcher's number of ranks.
[[nodiscard]] int launched_size();

// A world of its own, which a test may end: everything that an earlier one left is gone.
[[nodiscard]] Communicator fresh_world(
    const std::string& engine = "mpi",
    std::chrono::milliseconds timeout = std::chrono::milliseconds(20'000));

// Runs `body` in a new group of all ranks of a world that lasts.
void run_in_group(const std::string& engine, const std::function<void(Communicator&)>& body);

}  // namespace hsdp::test
