// The last calls of one rank in one group, and which planned calls no longer need comparing. A
// planned call is compared once and then made without asking the peers. As a safeguard, the ranks
// compare a hash of these calls now and then; and if a call waits for long, the rank tells its
// neighbours in the group what it has called [Note: planned calls].
//
// Thread-safe. Never blocks, except for compare().
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

  // Starts the next call, planned or not. Returns the word kept by agreed() if all ranks have made
  // this planned call before; otherwise the engine must compare it with the peers' calls.
  std::optional<std::uint32_t> begin(const HostCall& call);
  // All ranks have made that call. For a planned call, keeps `word` for the engine.
  void agreed(const HostCall& call, std::uint32_t word = 0);
  // Makes every planned call be compared again: the group's memory has changed on every rank.
  void forget();

  // The number of calls so far, which is also the number of the last one.
  [[nodiscard]] std::uint64_t sequence() const;
  // This rank has waited for long in that call. A neighbour in a different call ends the world.
  void tell_of_wait(std::uint64_t sequence) const;
  void tell_of_wait() const { tell_of_wait(sequence()); }
  // A member sent data instead of a call: ends the world, with that member's report if it comes.
  [[noreturn]] void end_by_data(int member, WaitState waiting) const;
  // Hash of all planned calls so far: the same on every member, between calls.
  [[nodiscard]] std::uint64_t hash() const;
  // Collective; `key` names this comparison. Ends the world if the members' last calls differ.
  void compare(const std::string& key) const;

 private:
  [[nodiscard]] std::string topic() const { return "calls/" + group_; }
  struct Entry {
    std::uint64_t sequence = 0;
    std::uint64_t hash = 0;  // of this call and all earlier ones
    HostCall call;
  };
  void tell(std::uint64_t sequence, int member) const;
  void hear(int from, std::string_view message) const;
  // The first difference between the texts of those ranks.
  [[nodiscard]] std::optional<Failure> difference(std::span<const int> ranks,
                                                  std::span<const std::string> texts) const;
  // The recorded calls, as sent to other ranks.
  [[nodiscard]] std::string text() const;
  [[nodiscard]] static std::vector<Entry> entries_in(std::string_view text);
  [[nodiscard]] static std::string text_of(std::span<const Entry> entries);

  std::shared_ptr<Control> control_;
  std::string group_;
  std::vector<int> members_;
  std::string engine_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
  std::unordered_map<std::string, std::uint32_t> agreed_;  // keyed by the bytes of the call
  std::uint64_t hash_ = 0;
  std::shared_ptr<void> listening_;  // destroyed before what it uses
};

}  // namespace hsdp::comm
