#include "hsdp/comm/mpi/mpi_link.h"

#include <mpi.h>

#include <utility>

#include "hsdp/comm/mpi/mpi_library.h"

namespace hsdp::comm {

struct MpiLink::Opening {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  bool is_open = false;
  std::vector<std::byte> mine;
  std::vector<std::byte> all;
};

namespace {

bool is_complete(MPI_Request& request, const char* what) {
  const MpiUse use;
  int done = 0;
  check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
  return done != 0;
}

int tag_limit() {
  int* limit = nullptr;
  int is_set = 0;
  check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &is_set),
            "MPI_Comm_get_attr");
  constexpr int kGuaranteed = 32'767;
  return is_set != 0 ? *limit : kGuaranteed;
}

}  // namespace

MpiLink::MpiLink() : opening_(std::make_unique<Opening>()) {
  const MpiUse use;
  largest_tag_ = tag_limit();
  check_mpi(MPI_Comm_idup(MPI_COMM_WORLD, &opening_->comm, &opening_->request), "MPI_Comm_idup");
}

// Do not free it while something is in progress there, or inside MPI_Finalize.
MpiLink::~MpiLink() {
  if (!MpiUse::is_possible() || !opening_->is_open || is_abandoned_ ||
      opening_->request != MPI_REQUEST_NULL) {
    static_cast<void>(opening_.release());
    return;
  }
  try {
    const MpiUse use;
    MPI_Comm_free(&opening_->comm);
  } catch (const std::exception&) {  // MPI was finalized meanwhile
  }
}

bool MpiLink::is_open() {
  if (opening_->is_open) return true;
  if (!is_complete(opening_->request, "MPI_Comm_idup")) return false;
  const MpiUse use;
  check_mpi(MPI_Comm_set_errhandler(opening_->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  opening_->is_open = true;
  return true;
}

void MpiLink::start_gather(std::vector<std::byte> mine) {
  const auto ranks = static_cast<std::size_t>(mpi_place().size);
  opening_->mine = std::move(mine);
  opening_->all.assign(opening_->mine.size() * ranks, std::byte{});
  const int bytes = static_cast<int>(opening_->mine.size());
  const MpiUse use;
  check_mpi(MPI_Iallgather(opening_->mine.data(), bytes, MPI_BYTE, opening_->all.data(), bytes,
                           MPI_BYTE, opening_->comm, &opening_->request),
            "MPI_Iallgather");
}

bool MpiLink::is_gathered() { return is_complete(opening_->request, "MPI_Iallgather"); }

const std::vector<std::byte>& MpiLink::gathered() const { return opening_->all; }

void MpiLink::make_progress() {
  const MpiUse use;
  int found = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, opening_->comm, &found, MPI_STATUS_IGNORE);
}

int MpiLink::handle() const { return MPI_Comm_c2f(opening_->comm); }

}  // namespace hsdp::comm
