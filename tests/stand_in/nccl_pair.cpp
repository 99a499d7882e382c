#include "nccl_pair.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda_runtime.h"
#include "nccl_ranks.h"

namespace hsdp::test {

NcclPair::NcclPair() {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  nccl_stand_in().reset();
  library_ = comm::NcclLibrary::open();
  for (int rank : {0, 1}) {
    cudaSetDevice(rank);
    Rank& made = ranks_[static_cast<std::size_t>(rank)];
    cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking);
    made.sent = library_->allocate(kBytes);
    made.received = library_->allocate(2 * kBytes);
    std::memset(made.sent, rank + 1, kBytes);
  }
  connect();
}

void NcclPair::connect() {
  const std::string id = library_->new_id();
  for (int rank : {0, 1}) {
    comm::NcclHandle& comm = ranks_[static_cast<std::size_t>(rank)].comm;
    if (comm != nullptr) library_->abort(comm);
    cudaSetDevice(rank);
    comm = library_->begin_init(2, id, rank);
  }
  settle();
}

comm::NcclHandle NcclPair::alone() {
  cudaSetDevice(0);
  comm::NcclHandle const other = library_->begin_init(1, library_->new_id(), 0);
  settle(other);
  return other;
}

NcclPair::~NcclPair() {
  for (Rank& rank : ranks_) {
    if (rank.comm != nullptr) library_->abort(rank.comm);
    cudaStreamSynchronize(rank.stream);
    cudaStreamDestroy(rank.stream);
    library_->free(rank.sent);
    library_->free(rank.received);
  }
  cudaSetDevice(0);
  EXPECT_EQ(nccl_stand_in().races(), expected_races_);
  ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
}

}  // namespace hsdp::test
