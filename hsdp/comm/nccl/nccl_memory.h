// The memory of one group: what Communicator::allocate gives out, and the work memory in which its
// collectives receive.
//
// Where NCCL is told about memory it lets one GPU write into that of another, if it was told on
// both sides of a transfer. If it was told on one side only, the transfer hangs [Note: registered
// memory]. So memory is registered on every rank or on none, a call has its memory registered on
// all ranks or on none, and it receives into registered memory exactly where it sends from such.
//
// One call at a time, but for blocks that die.
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
  ~NcclMemory();  // waits for the work memory; where the GPU hangs it is left to it
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  // Collective over the group, and fails on every rank when it fails on one; the group stays
  // usable. From NCCL and registered where the library can, else from the device's pool. The last
  // view must not die before the work that uses it is done.
  [[nodiscard]] SharedMemory allocate(NcclGroup& group, std::int64_t count, Dtype dtype);
  // The same for work memory of at least that size and that kind, for calls to come. All ranks ask
  // for one size.
  void reserve(NcclGroup& group, std::size_t bytes, bool registered);

  [[nodiscard]] bool is_registered(const void* memory) const;
  [[nodiscard]] bool has_work(std::size_t bytes, bool registered) const;
  [[nodiscard]] std::int64_t work_bytes() const;  // of both kinds
  // For one call, in a task of its stream; free again with the event that release() gets. Null
  // where has_work() is false.
  [[nodiscard]] std::byte* take_work(std::size_t bytes, bool registered, Stream& stream);
  void release_work(const Event& done);

 private:
  class Block;
  [[nodiscard]] std::shared_ptr<Block> make_block(NcclGroup& group, std::size_t bytes,
                                                  bool registered);
  void stop_registering(NcclGroup& group);

  std::vector<std::weak_ptr<Block>> blocks_;
  bool registers_ = true;
  struct Work {  // what a GPU may be using
    std::shared_ptr<Block> block;
    Event free;
    InFlight outgrown;
  };
  [[nodiscard]] Work* find_work(std::size_t bytes, bool registered) const;
  // What was not registered and what was when it was taken.
  std::array<std::unique_ptr<Work>, 2> work_{std::make_unique<Work>(), std::make_unique<Work>()};
  Work* taken_ = nullptr;
};

}  // namespace hsdp::comm
