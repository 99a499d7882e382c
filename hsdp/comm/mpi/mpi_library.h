// The MPI library of this process: initialised here unless the program did that, and then finalized
// when the process exits.
//
// One per process, thread-safe. Nothing of MPI is called once MPI_Finalize has begun, whoever calls
// it, nor in a forked child: MpiUse guards every call.
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <string>

namespace hsdp::comm {

// Initialises MPI when the program did not. UsageError when it was finalized, or when its thread
// level is below MPI_THREAD_MULTIPLE: two groups of a mesh move at the same time.
void open_mpi();

struct MpiPlace {
  int rank = 0;
  int size = 1;
};
// In MPI_COMM_WORLD.
[[nodiscard]] MpiPlace mpi_place();
// UsageError unless MPI counts the ranks as the launcher's variables do.
void require_mpi_place(int rank, int size);

// Held around calls of MPI. UsageError when MPI was finalized; Error in a forked child.
class MpiUse {
 public:
  MpiUse();
  // True, and safe, when MPI can be called: for destructors and background work.
  [[nodiscard]] static bool is_possible();

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

// What becomes of an MPI that we initialised when the process exits. It only gets worse.
enum class MpiExit : std::uint8_t {
  kFinalize,  // as usual: waits for all ranks to finalize
  kBounded,   // a world failed: a dead rank never finalizes, so this one leaves after a while
  kLeave,     // a transfer could not be ended: without MPI_Finalize, the launcher may complain
};
void worsen_mpi_exit(MpiExit way);

// "mpi: <what> failed: <the library's text>" as an Error, for a code other than MPI_SUCCESS.
void check_mpi(int code, const std::string& what);

}  // namespace hsdp::comm
