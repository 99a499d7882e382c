#include "hsdp/comm/optional_engines.h"
#include "hsdp/error.h"

namespace hsdp::comm {

void require_mpi() {
  throw UsageError(
      "engine: mpi: this build of hsdp has none; build it with -DHSDP_MPI=ON, or use "
      "engine 'host'");
}

Communicator mpi_world(const std::shared_ptr<Control>& /*control*/) {
  require_mpi();
  return {};
}

LaunchEnvironment meet_over_mpi(LaunchEnvironment launch, bool /*is_engine*/,
                                std::chrono::milliseconds /*timeout*/) {
  return launch;
}

}  // namespace hsdp::comm
