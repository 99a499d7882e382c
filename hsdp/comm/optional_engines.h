// Engines that a build may lack: each is x.cpp or no_x.cpp, chosen by CMake.
#pragma once

#include <chrono>
#include <memory>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/control.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/tensor_view.h"

namespace hsdp::comm {

// Throw UsageError, naming the CMake option, when this build lacks the engine.
void require_nccl();
void require_mpi();

// The engine's group of all ranks of the world. Collective.
[[nodiscard]] Communicator nccl_world(const std::shared_ptr<Control>& control, Device device);
[[nodiscard]] Communicator mpi_world(const std::shared_ptr<Control>& control);

// What MPI can add to how the ranks of several hosts meet: an address of rank 0 and a secret, where
// the settings lack them, and for its own engine (`is_engine`) whether there are several hosts at
// all. Unchanged where nothing is missing, where the launcher is not MPI's, and in a build without
// MPI. Collective over the job when it is not.
[[nodiscard]] LaunchEnvironment meet_over_mpi(LaunchEnvironment launch, bool is_engine,
                                              std::chrono::milliseconds timeout);

}  // namespace hsdp::comm
