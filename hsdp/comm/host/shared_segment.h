// Anonymous memory that several ranks of one host map: a sealed memfd, backed by pages before use
// [Note: memory without names].
//
// Owns its mapping. A peer that maps the same pages has another SharedSegment (ranks that are
// threads share one object). Zero-initialised. A lack of space is an Error at construction, never a
// signal later. Thread-safe after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/unique_fd.h"
#include "hsdp/error.h"

namespace hsdp::comm {

class SharedSegment {
 public:
  // `what` names the memory in errors and in /proc/PID/maps.
  [[nodiscard]] static std::shared_ptr<SharedSegment> create(std::size_t size,
                                                             const std::string& what);
  // Maps what a peer created; rejects a descriptor that could still shrink.
  [[nodiscard]] static std::shared_ptr<SharedSegment> map(UniqueFd fd, const std::string& what);

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] int descriptor() const { return fd_.get(); }
  // Keeps the mapping; from now on no other rank can map the segment.
  void close_descriptor() { fd_.reset(); }
  // Keeps this mapping out of forked children. For control blocks, which they must not touch.
  void hide_from_children();

 private:
  SharedSegment(UniqueFd fd, std::size_t size);
  void populate(const std::string& what);

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::uint64_t generation_ = 0;
};

// Every member passes its segment and gets everyone's, in the order of `members` (ascending world
// ranks, including this one). Collective; for `key` see Control::exchange. A member that could not
// make its segment passes null and the reason, which every member throws as an AgreedError. They
// also do so if one cannot map a peer's segment.
[[nodiscard]] std::vector<std::shared_ptr<SharedSegment>> exchange_segments(
    Control& control, const std::string& key, std::span<const int> members,
    const std::shared_ptr<SharedSegment>& mine, const std::string& reason);

}  // namespace hsdp::comm
