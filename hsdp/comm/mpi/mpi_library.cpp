#include "hsdp/comm/mpi/mpi_library.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <thread>

#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr std::chrono::seconds kBoundedFinalize{10};

// Lives as long as the process, since calls at exit come in any order.
struct Library {
  std::mutex opening;
  std::atomic<bool> is_open{false};
  std::atomic<pid_t> process{0};
  std::shared_mutex use;  // shared: an MPI call; exclusive: MPI_Finalize begins
  std::atomic<bool> is_finalizing{false};
  std::atomic<bool> is_finalized{false};
  std::atomic<MpiExit> exit{MpiExit::kFinalize};
};

Library& library() {
  static auto* const only = new Library;
  return *only;
}

std::string_view level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

// MPI_Finalize deletes the attributes of MPI_COMM_SELF before anything else.
int note_finalize(MPI_Comm /*comm*/, int /*key*/, void* /*value*/, void* /*extra*/) {
  Library& mpi = library();
  mpi.is_finalizing = true;
  const std::unique_lock wait_for_calls(mpi.use);
  return MPI_SUCCESS;
}

void watch_for_finalize() {
  int key = MPI_KEYVAL_INVALID;
  check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &note_finalize, &key, nullptr),
            "MPI_Comm_create_keyval");
  check_mpi(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
}

// A dead rank keeps MPI_Finalize from returning; the process must still end with its own status.
void finalize_at_exit(int status, void* /*unused*/) {
  Library& mpi = library();
  const MpiExit way = mpi.exit;
  if (mpi.process != ::getpid() || mpi.is_finalizing || way == MpiExit::kLeave) return;
  if (way == MpiExit::kBounded) {
    const AllSignalsBlocked blocked;
    std::thread([&mpi, status] {
      std::this_thread::sleep_for(kBoundedFinalize);
      if (!mpi.is_finalized) ::_exit(status);
    }).detach();
  }
  MPI_Finalize();
  mpi.is_finalized = true;
}

int initialize() {
  int level = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  ::on_exit(&finalize_at_exit, nullptr);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  return level;
}

[[noreturn]] void throw_finalized() {
  throw UsageError(
      "mpi: MPI was finalized while hsdp still needs it; close the mesh and its reducers before "
      "MPI_Finalize");
}

void require_level(int level, bool is_ours) {
  if (level >= MPI_THREAD_MULTIPLE) return;
  const std::string got =
      "mpi: thread level: expected MPI_THREAD_MULTIPLE, got " + std::string(level_name(level));
  throw UsageError(got + (is_ours ? ", the most that this MPI library gives; use one that is built "
                                    "with thread support, or engine 'host'"
                                  : "; initialise MPI with MPI_Init_thread(..., "
                                    "MPI_THREAD_MULTIPLE, ...), or leave that to hsdp"));
}

}  // namespace

void check_mpi(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw Error("mpi: " + what + " failed: " +
              std::string(text.data(), static_cast<std::size_t>(std::max(length, 0))));
}

void open_mpi() {
  Library& mpi = library();
  const std::lock_guard lock(mpi.opening);
  int is_finalized = 0;
  MPI_Finalized(&is_finalized);
  if (is_finalized != 0 || mpi.is_finalizing) throw_finalized();
  if (mpi.is_open) return;
  int is_initialized = 0;
  MPI_Initialized(&is_initialized);
  int level = MPI_THREAD_SINGLE;
  if (is_initialized != 0) {
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  } else {
    mpi.process = ::getpid();
    level = initialize();
  }
  require_level(level, is_initialized == 0);
  mpi.process = ::getpid();
  watch_for_finalize();
  mpi.is_open = true;
}

MpiPlace mpi_place() {
  const MpiUse use;
  MpiPlace place;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &place.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &place.size), "MPI_Comm_size");
  return place;
}

void require_mpi_place(int rank, int size) {
  const MpiPlace place = mpi_place();
  if (place.rank == rank && place.size == size) return;
  throw UsageError("mpi: place: expected rank " + std::to_string(rank) + " of " +
                   std::to_string(size) + " in MPI_COMM_WORLD, as the launcher's variables say, " +
                   "got rank " + std::to_string(place.rank) + " of " + std::to_string(place.size) +
                   "; start the program with the mpirun of the MPI that hsdp was built with");
}

bool MpiUse::is_possible() {
  Library& mpi = library();
  return mpi.is_open && !mpi.is_finalizing && mpi.process == ::getpid();
}

MpiUse::MpiUse() {
  Library& mpi = library();
  if (mpi.process != ::getpid()) {
    throw UsageError({.where = "mpi",
                      .expected = "use in the process that opened it",
                      .got = "use in a forked child",
                      .remedy = "use it in the parent only"});
  }
  if (mpi.is_finalizing) throw_finalized();
  lock_ = std::shared_lock(mpi.use);
  if (mpi.is_finalizing) throw_finalized();
}

void worsen_mpi_exit(MpiExit way) {
  std::atomic<MpiExit>& exit = library().exit;
  MpiExit now = exit;
  while (now < way && !exit.compare_exchange_weak(now, way)) {
  }
}

}  // namespace hsdp::comm
