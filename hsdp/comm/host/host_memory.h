// Which memory of this rank peers can read, and where this rank maps theirs.
//
// One per rank and world, shared by all groups split from it: memory allocated in one group works
// directly in every group whose members all map it. A part is one rank's share of an allocation,
// identified by its owner and a number. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "hsdp/comm/host/shared_segment.h"

namespace hsdp::comm {

class HostMemory {
 public:
  struct Place {
    std::uint32_t part = 0;
    std::uint64_t offset = 0;
  };

  // The segment size for `size` bytes of user memory, which lie at its start.
  [[nodiscard]] static std::size_t segment_size(std::size_t size);

  // A number for a part that this rank will share; never 0.
  [[nodiscard]] std::uint32_t next_part();
  // `mappers`: world ranks that map the part, until drop_own.
  void add_own(std::uint32_t part, std::shared_ptr<SharedSegment> segment, std::size_t size,
               std::span<const int> mappers);
  void drop_own(std::uint32_t part);
  void add_peer(int owner, std::uint32_t part, std::shared_ptr<SharedSegment> segment);

  // The place of [data, data + size), if all of it lies in one part that all `members` map.
  [[nodiscard]] std::optional<Place> find(const void* data, std::size_t size,
                                          std::span<const int> members) const;
  // This process's address of a peer's part; null if it is not mapped here.
  [[nodiscard]] std::byte* peer(int owner, Place place) const;

  // How many parts this rank has dropped; peers unmap theirs when the number changes.
  [[nodiscard]] std::uint32_t dropped() const { return dropped_.load(); }
  void forget_dropped();  // unmaps all parts whose owners dropped them

 private:
  struct OwnPart {
    std::uint32_t part = 0;
    const std::byte* data = nullptr;
    std::size_t size = 0;
    std::vector<int> mappers;  // ascending
    std::shared_ptr<SharedSegment> segment;
  };

  mutable std::mutex mutex_;
  std::uint32_t next_part_ = 1;
  std::atomic<std::uint32_t> dropped_{0};
  std::vector<OwnPart> own_;
  std::map<std::pair<int, std::uint32_t>, std::shared_ptr<SharedSegment>> peers_;
};

}  // namespace hsdp::comm
