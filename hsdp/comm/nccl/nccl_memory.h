// The memory of one group: what Communicator::allocate returns, and the work memory in which its
// collectives receive.
//
// NCCL lets one GPU write directly into another's memory if both sides of a transfer have
// registered theirs. If only one side has, the transfer hangs [Note: registered memory]. So a
// block, and a call's memory, is registered on all ranks or on none; and a call receives into
// registered memory exactly when it sends from registered memory.
//
// One call at a time, except that blocks may be destroyed at any time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/in_flight.h"

namespace hsdp::comm {

class NcclGroup;

class NcclMemory {
 public:
  NcclMemory() = default;
  ~NcclMemory();  // waits for the work memory; leaks what a hanging GPU may still use
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  // Collective over the group. If it fails on one rank, it fails on all; the group stays usable.
  // The memory comes from NCCL and is registered if the library supports that; otherwise it comes
  // from the device's pool. The last view must outlive the work that uses it.
  [[nodiscard]] SharedMemory allocate(NcclGroup& group, std::int64_t count, Dtype dtype);
  // The same for work memory of at least that size and that kind, for later calls. All ranks ask
  // for the same size.
  void reserve(NcclGroup& group, std::size_t bytes, bool registered);

  [[nodiscard]] bool is_registered(const void* memory) const;
  [[nodiscard]] bool has_work(std::size_t bytes, bool registered) const;
  [[nodiscard]] std::int64_t work_bytes() const;  // of both kinds
  // Work memory for one call, in a task of its stream; free again after the event passed to
  // release_work(). Null if has_work() is false.
  [[nodiscard]] std::byte* take_work(std::size_t bytes, bool registered, Stream& stream);
  void release_work(const Event& done);

 private:
  class Block;
  [[nodiscard]] std::shared_ptr<Block> make_block(NcclGroup& group, std::size_t bytes,
                                                  bool registered);
  void stop_registering(NcclGroup& group);

  std::vector<std::weak_ptr<Block>> blocks_;
  bool registers_ = true;
  struct Work {  // memory that a GPU may be using
    std::shared_ptr<Block> block;
    Event free;
    InFlight outgrown;
  };
  [[nodiscard]] Work* find_work(std::size_t bytes, bool registered) const;
  // The unregistered and the registered one, as they were when taken.
  std::array<std::unique_ptr<Work>, 2> work_{std::make_unique<Work>(), std::make_unique<Work>()};
  Work* taken_ = nullptr;
};

}  // namespace hsdp::comm
