// What the tests of the MPI engine share. mpirun starts the program: every rank runs every test, in
// the same order.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "hsdp/comm/world.h"

namespace hsdp::test {

// The number of ranks that the launcher started.
[[nodiscard]] int launched_size();

// A new world that a test may end; nothing of an earlier one is left.
[[nodiscard]] Communicator fresh_world(
    const std::string& engine = "mpi",
    std::chrono::milliseconds timeout = std::chrono::milliseconds(20'000));

// Runs `body` in a new group of all ranks of a world that stays open.
void run_in_group(const std::string& engine, const std::function<void(Communicator&)>& body);

}  // namespace hsdp::test
