// The last calls of one rank in one group, and which planned ones of them need no look at the
// peers' any more. Planned calls are compared once and then made without asking anybody: so a hash
// of them is compared now and then, and where a call waits long the rank tells its neighbours in
// the group what it has called [Note: planned calls].
//
// Thread-safe. Never blocks, but for compare().
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/host/host_call.h"

namespace hsdp::comm {

class PlannedCalls {
 public:
  // `members` are the world ranks of the group, at least two; `engine` is for messages.
  PlannedCalls(std::shared_ptr<Control> control, std::string group, std::vector<int> members,
               std::string engine);

  // Starts the next call, planned or not. Returns what agreed() kept if all ranks have made this
  // planned call before; else the engine compares it with the peers'.
  std::optional<std::uint32_t> begin(const HostCall& call);
  // All ranks have made that call. Of a planned one `word` is kept, for the engine.
  void agreed(const HostCall& call, std::uint32_t word = 0);
  // Planned calls are compared once more: memory of the group is not what it was, on every rank.
  void forget();

  // The number of calls so far, which is that of the last one.
  [[nodiscard]] std::uint64_t sequence() const;
  // This rank has long waited in that call. A neighbour that has made another one ends the world.
  void tell_of_wait(std::uint64_t sequence) const;
  void tell_of_wait() const { tell_of_wait(sequence()); }
  // That member sent data in place of a call: ends the world, by what it says or by this.
  [[noreturn]] void end_by_data(int member, WaitState waiting) const;
  // Of all planned calls so far: the same on every member, between calls.
  [[nodiscard]] std::uint64_t hash() const;
  // Collective; `key` names the look. Ends the world where the members' last calls differ.
  void compare(const std::string& key) const;

 private:
  [[nodiscard]] std::string topic() const { return "calls/" + group_; }
  struct Entry {
    std::uint64_t sequence = 0;
    std::uint64_t hash = 0;  // of this call and all before
    HostCall call;
  };
  void tell(std::uint64_t sequence, int member) const;
  void hear(int from, std::string_view message) const;
  // The first difference in the texts of those ranks.
  [[nodiscard]] std::optional<Failure> difference(std::span<const int> ranks,
                                                  std::span<const std::string> texts) const;
  // The calls that are kept, as others get them.
  [[nodiscard]] std::string text() const;
  [[nodiscard]] static std::vector<Entry> entries_in(std::string_view text);
  [[nodiscard]] static std::string text_of(std::span<const Entry> entries);

  std::shared_ptr<Control> control_;
  std::string group_;
  std::vector<int> members_;
  std::string engine_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
  std::unordered_map<std::string, std::uint32_t> agreed_;  // by the bytes of the call
  std::uint64_t hash_ = 0;
  std::shared_ptr<void> listening_;  // ends before what it uses
};

}  // namespace hsdp::comm
