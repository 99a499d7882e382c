// The last calls of one rank in one group. Planned calls are compared once and then made without
// asking anybody: so a hash of them is compared now and then, and where a call waits long the rank
// tells its neighbours in the group what it has called [Note: planned calls].
//
// Thread-safe. Never blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/host/host_call.h"

namespace hsdp::comm {

// After which a rank tells its neighbours, and again after twice as long.
constexpr std::chrono::milliseconds kLongWait{2'000};

class CallRecord {
 public:
  // `members` are the world ranks of the group, at least two.
  CallRecord(std::shared_ptr<Control> control, const std::string& group, std::vector<int> members);

  // The next one, from 1 on, and whether this rank asks the others about it.
  void add(const HostCall& call, bool asks);
  // This rank has long waited in that one. A neighbour that has made another one ends the world.
  void tell_of_wait(std::uint64_t sequence) const;
  // Of all planned calls so far.
  [[nodiscard]] std::uint64_t planned_hash() const;
  // The calls that are kept, as others get them.
  [[nodiscard]] std::string text() const;
  // The first difference in the texts of those ranks.
  [[nodiscard]] std::optional<Failure> difference(std::span<const int> ranks,
                                                  std::span<const std::string> texts) const;

 private:
  struct Entry {
    std::uint64_t sequence = 0;
    std::uint64_t hash = 0;  // of this call and all before
    HostCall call;
  };
  void hear(int from, std::string_view message) const;
  [[nodiscard]] static std::vector<Entry> entries_in(std::string_view text);
  [[nodiscard]] static std::string text_of(std::span<const Entry> entries);

  std::shared_ptr<Control> control_;
  std::string topic_;
  std::vector<int> members_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
  std::uint64_t planned_hash_ = 0;
  std::shared_ptr<void> listening_;  // ends before what it uses
};

}  // namespace hsdp::comm
