// Two ranks of one process that call the stand-in for libnccl through NcclLibrary. Each has a GPU,
// a stream, and memory to send from and receive into.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <memory>

#include "hsdp/comm/nccl/nccl_library.h"

struct CUstream_st;

namespace hsdp::test {

class NcclPair : public ::testing::Test {
 public:
  struct Rank {
    comm::NcclHandle comm = nullptr;
    CUstream_st* stream = nullptr;  // a cudaStream_t
    void* sent = nullptr;
    void* received = nullptr;
  };

 protected:
  static constexpr std::size_t kBytes = 64;  // sent; twice as much can be received

  NcclPair();
  ~NcclPair() override;

  Rank& first() { return ranks_[0]; }
  Rank& second() { return ranks_[1]; }

  // New communicators for both, in place of the old ones.
  void connect();
  // A communicator that only the first rank's device is in.
  [[nodiscard]] comm::NcclHandle alone();
  void settle() {
    for (Rank& rank : ranks_) settle(rank.comm);
  }
  void settle(comm::NcclHandle comm) {
    while (library_->status(comm).state == comm::NcclStatus::State::kInProgress) continue;
  }
  template <typename Calls>
  void group(Calls calls) {
    library_->group_start();
    try {
      calls();
    } catch (...) {
      library_->group_end();
      throw;
    }
    library_->group_end();
  }

  std::shared_ptr<const comm::NcclLibrary> library_;
  int expected_races_ = 0;  // of host threads, as the stand-in has counted them in the end
  std::array<Rank, 2> ranks_;
};

}  // namespace hsdp::test
