// Our own communicator over all ranks of MPI_COMM_WORLD. The groups of one world share it; their
// tags tell their messages apart.
//
// Thread-safe once it is open. Point-to-point only: nothing started there needs ranks that are gone
// in order to complete [Note: MPI point to point].
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hsdp::comm {

class MpiLink {
 public:
  // Starts opening it. Collective over MPI_COMM_WORLD, in the same order on every rank.
  MpiLink();
  ~MpiLink();
  MpiLink(const MpiLink&) = delete;
  MpiLink& operator=(const MpiLink&) = delete;

  // Checks whether it is open.
  [[nodiscard]] bool is_open();
  [[nodiscard]] int largest_tag() const { return largest_tag_; }

  // Starts to send `mine`, of the same size on all ranks, to every rank. One gather at a time,
  // before any transfers.
  void start_gather(std::vector<std::byte> mine);
  // Whether all blocks have arrived; the result holds them in rank order.
  [[nodiscard]] bool is_gathered();
  [[nodiscard]] const std::vector<std::byte>& gathered() const;

  // Lets the MPI library work on what this process still has to send.
  void make_progress();

  // Call it when a call failed half way: messages may be in flight that no rank will receive. The
  // communicator is then never freed, since MPI would deliver them to the next one with its number.
  void abandon() { is_abandoned_ = true; }

  // The communicator as MPI's integer handle, valid in every source file.
  [[nodiscard]] int handle() const;

 private:
  struct Opening;  // what MPI works on
  std::unique_ptr<Opening> opening_;
  int largest_tag_ = 0;
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace hsdp::comm
