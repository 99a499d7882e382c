// A communicator of our own over all ranks of MPI_COMM_WORLD: what the groups of one world talk
// over, told apart by their tags.
//
// Thread-safe once it is open. Point-to-point only: nothing that was started there has to be
// completed by ranks which are no more [Note: MPI point to point].
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hsdp::comm {

class MpiLink {
 public:
  // Starts to open it. Collective over MPI_COMM_WORLD, in the same order on every rank.
  MpiLink();
  ~MpiLink();
  MpiLink(const MpiLink&) = delete;
  MpiLink& operator=(const MpiLink&) = delete;

  // Looks whether it is open.
  [[nodiscard]] bool is_open();
  [[nodiscard]] int largest_tag() const { return largest_tag_; }

  // Starts to hand `mine`, of one size on all ranks, to every rank; one at a time, before any
  // transfers.
  void start_gather(std::vector<std::byte> mine);
  // True when all blocks have come; result: one after the other in rank order.
  [[nodiscard]] bool is_gathered();
  [[nodiscard]] const std::vector<std::byte>& gathered() const;

  // Lets the MPI library work on what it still has to send for this process.
  void make_progress();

  // A call broke off: messages may be on their way that nobody will receive. The communicator then
  // stays for good, since MPI would give them to the next one of the same number.
  void abandon() { is_abandoned_ = true; }

  // The communicator as MPI's integer handle, good for every source file.
  [[nodiscard]] int handle() const;

 private:
  struct Opening;  // what MPI works on
  std::unique_ptr<Opening> opening_;
  int largest_tag_ = 0;
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace hsdp::comm
