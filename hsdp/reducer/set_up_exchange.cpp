#include "hsdp/reducer/set_up_exchange.h"

#include <algorithm>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

constexpr std::string_view kSetUp = "set-up: ";

// Of a line "set-up: make its Reducer" in front of the message.
std::string_view act_of(std::string_view message) {
  if (!message.starts_with(kSetUp)) return "another call";
  message.remove_prefix(kSetUp.size());
  return message.substr(0, message.find('\n'));
}

}  // namespace

std::vector<std::string> exchange_in_set_up(Communicator& world, std::string_view what,
                                            std::string_view message,
                                            const std::exception_ptr& own) {
  std::string mine(kSetUp);
  mine.append(what).append("\n").append(message);
  std::vector<std::string> all = world.exchange(mine, "set-up");
  const std::string first(act_of(all.front()));
  const auto other = std::ranges::find_if(
      all, [&first](std::string_view theirs) { return act_of(theirs) != first; });
  if (other != all.end()) {
    if (own) std::rethrow_exception(own);
    const auto rank = static_cast<int>(other - all.begin());
    throw MismatchError({.where = "reducer: set-up",
                         .expected = "'" + first + "' on every rank",
                         .got = "'" + std::string(act_of(*other)) + "' on " +
                                comm::ranks_text({rank}, world.size()),
                         .remedy = "make the same Reducers, hooks and optimizers in the same order "
                                   "on every rank, and begin their steps in the same order"},
                        {world.world_rank(rank)});
  }
  for (std::string& text : all) text.erase(0, text.find('\n') + 1);
  return all;
}

}  // namespace hsdp::reducer
