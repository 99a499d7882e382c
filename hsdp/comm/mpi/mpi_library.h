// The MPI library of this process. If the program has not initialised MPI, we do, and finalize it
// when the process exits.
//
// One per process, thread-safe. No thread calls MPI once MPI_Finalize has begun, or in a forked
// child: MpiUse guards every call.
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <string>

namespace hsdp::comm {

// Initialises MPI unless the program has. Throws UsageError if MPI was finalized, or if its thread
// level is below MPI_THREAD_MULTIPLE: two groups of a mesh move data at the same time.
void open_mpi();

struct MpiPlace {
  int rank = 0;
  int size = 1;
};
// In MPI_COMM_WORLD.
[[nodiscard]] MpiPlace mpi_place();
// Throws UsageError unless MPI's rank and size equal those in the launcher's variables.
void require_mpi_place(int rank, int size);

// Hold it around MPI calls. Throws UsageError if MPI was finalized, and Error in a forked child.
class MpiUse {
 public:
  MpiUse();
  // Whether MPI can be called. Always safe: for destructors and background work.
  [[nodiscard]] static bool is_possible();

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

// How an MPI that we initialised ends when the process exits. It only gets worse.
enum class MpiExit : std::uint8_t {
  kFinalize,  // normal: waits for all ranks to finalize
  kBounded,   // a world failed: a dead rank never finalizes, so this one exits after a while
  kLeave,     // a transfer could not be ended: skips MPI_Finalize; the launcher may complain
};
void worsen_mpi_exit(MpiExit way);

// Throws Error "mpi: <what> failed: <the library's text>" unless `code` is MPI_SUCCESS.
void check_mpi(int code, const std::string& what);

}  // namespace hsdp::comm
