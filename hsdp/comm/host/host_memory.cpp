#include "hsdp/comm/host/host_memory.h"

#include <algorithm>
#include <atomic>

#include "hsdp/comm/host/page.h"

namespace hsdp::comm {
namespace {

// The last page of a segment: tells peers that map it when the owner has dropped it.
std::atomic_ref<std::uint32_t> dropped_mark(const SharedSegment& segment) {
  return std::atomic_ref(
      *reinterpret_cast<std::uint32_t*>(segment.data() + segment.size() - kPageBytes));
}

}  // namespace

std::size_t HostMemory::segment_size(std::size_t size) { return whole_pages(size) + kPageBytes; }

std::uint32_t HostMemory::next_part() {
  const std::lock_guard lock(mutex_);
  return next_part_++;
}

void HostMemory::add_own(std::uint32_t part, std::shared_ptr<SharedSegment> segment,
                         std::size_t size, std::span<const int> mappers) {
  const std::lock_guard lock(mutex_);
  std::byte* const data = segment->data();
  own_.push_back(
      {part, data, size, std::vector<int>(mappers.begin(), mappers.end()), std::move(segment)});
  std::ranges::sort(own_.back().mappers);
}

void HostMemory::drop_own(std::uint32_t part) {
  std::shared_ptr<SharedSegment> last;
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(own_, part, &OwnPart::part);
  if (found == own_.end()) return;
  last = std::move(found->segment);
  own_.erase(found);
  dropped_mark(*last).store(1);
  ++dropped_;
}

void HostMemory::add_peer(int owner, std::uint32_t part, std::shared_ptr<SharedSegment> segment) {
  const std::lock_guard lock(mutex_);
  peers_[{owner, part}] = std::move(segment);
}

std::optional<HostMemory::Place> HostMemory::find(const void* data, std::size_t size,
                                                  std::span<const int> members) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  for (const OwnPart& own : own_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(own.data);
    if (address < begin || address > begin + own.size || size > begin + own.size - address) {
      continue;
    }
    const bool all_map_it = std::ranges::all_of(
        members, [&](int rank) { return std::ranges::binary_search(own.mappers, rank); });
    if (all_map_it) return Place{own.part, address - begin};
  }
  return std::nullopt;
}

std::byte* HostMemory::peer(int owner, Place place) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find({owner, place.part});
  if (found == peers_.end() || place.offset > found->second->size()) return nullptr;
  return found->second->data() + place.offset;
}

void HostMemory::forget_dropped() {
  const std::lock_guard lock(mutex_);
  std::erase_if(peers_, [](const auto& entry) { return dropped_mark(*entry.second).load() != 0; });
}

}  // namespace hsdp::comm
