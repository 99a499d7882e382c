#include "hsdp/comm/optional_engines.h"
#include "hsdp/error.h"

namespace hsdp::comm {

void require_mpi() {
  throw UsageError({.where = "engine: mpi",
                    .expected = "a build of hsdp with MPI",
                    .got = "one without",
                    .remedy = "configure with -DHSDP_MPI=ON, or use engine 'host'"});
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
