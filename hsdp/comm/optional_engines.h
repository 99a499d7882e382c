// Engines that a build may lack: CMake chooses x.cpp or no_x.cpp for each.
#pragma once

#include <chrono>
#include <memory>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/control.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/tensor_view.h"

namespace hsdp::comm {

// Throw UsageError, naming the CMake option, if this build lacks the engine.
void require_nccl();
void require_mpi();

// The engine's group of all ranks of the world. Collective.
[[nodiscard]] Communicator nccl_world(const std::shared_ptr<Control>& control, Device device);
[[nodiscard]] Communicator mpi_world(const std::shared_ptr<Control>& control);

// Adds what MPI knows to how ranks on several hosts meet: an address of rank 0 and a secret, if the
// settings lack them, and for the mpi engine (`is_engine`) whether there are several hosts. Returns
// `launch` unchanged if nothing is missing, if the launcher is not MPI's, or in a build without
// MPI; otherwise it is collective over the job.
[[nodiscard]] LaunchEnvironment meet_over_mpi(LaunchEnvironment launch, bool is_engine,
                                              std::chrono::milliseconds timeout);

}  // namespace hsdp::comm
