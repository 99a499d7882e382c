// Messages between this rank and others that are in flight at the same time.
//
// Bytes only, of any size: a long message travels in pieces, one after the other. Between two
// ranks, the messages of a tag arrive in the order in which both sides add them. If several
// MpiTransfers are active, none may have a message longer than kPieceBytes. Not thread-safe.
//
// To give up early, destroy it: receptions are cancelled. What cannot be ended keeps its memory.
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

  // Keeps memory that the messages use until the last of them has ended.
  void keep(std::shared_ptr<void> memory);
  // `peer` is a rank of MPI_COMM_WORLD. The memory must stay valid until test() returns true.
  void send(int peer, const void* data, std::size_t size);
  void receive(int peer, void* data, std::size_t size);
  // Makes progress; returns true when everything is done.
  [[nodiscard]] bool test();
  // A peer that is waited for; -1: none.
  [[nodiscard]] int pending_peer() const;

 private:
  struct Pending;
  [[nodiscard]] bool end();
  std::unique_ptr<Pending> pending_;
};

}  // namespace hsdp::comm
