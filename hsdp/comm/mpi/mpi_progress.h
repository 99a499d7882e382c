// Calls MPI regularly while a world is open, whatever its ranks do.
//
// MPI moves a message only inside MPI calls. A rank that has handed over its last bytes and then
// waits elsewhere (for the status word) could make a peer wait for them forever
// [Note: MPI progress].
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "hsdp/comm/mpi/mpi_link.h"

namespace hsdp::comm {

class MpiProgress {
 public:
  explicit MpiProgress(std::shared_ptr<MpiLink> link);
  ~MpiProgress();
  MpiProgress(const MpiProgress&) = delete;
  MpiProgress& operator=(const MpiProgress&) = delete;

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;
  std::uint32_t fork_generation_;
};

}  // namespace hsdp::comm
