// Messages between this rank and others that are on their way at the same time.
//
// Bytes only, of any size: a long one travels in pieces, one after the other. Between two ranks the
// messages of a tag arrive in the order in which both sides name them; of several MpiTransfers at
// work at once none may hold a message longer than kPieceBytes. One thread at a time.
//
// Whoever gives up before all is done destroys it: receptions are cancelled, and what cannot be
// ended keeps the memory that it was given to keep.
#pragma once

#include <cstddef>
#include <memory>

#include "hsdp/comm/mpi/mpi_link.h"

namespace hsdp::comm {

class MpiTransfers {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{4} << 20;

  MpiTransfers(std::shared_ptr<MpiLink> link, int tag);
  ~MpiTransfers();
  MpiTransfers(const MpiTransfers&) = delete;
  MpiTransfers& operator=(const MpiTransfers&) = delete;

  // Memory that the messages use and that ends with their owner.
  void keep(std::shared_ptr<void> memory);
  // `peer` is a rank of MPI_COMM_WORLD. The memory must stay until test() is true.
  void send(int peer, const void* data, std::size_t size);
  void receive(int peer, void* data, std::size_t size);
  // Moves on; true when nothing is left to do.
  [[nodiscard]] bool test();
  // Somebody who is waited for, -1: nobody.
  [[nodiscard]] int pending_peer() const;

 private:
  struct Pending;
  [[nodiscard]] bool end();
  std::unique_ptr<Pending> pending_;
};

}  // namespace hsdp::comm
