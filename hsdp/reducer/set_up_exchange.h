// What all ranks tell each other in a set-up, each message with what it is for.
//
// Messages of set-ups are told apart by their order only. Where a rank makes another number of
// Reducers, or makes or begins them in another order, two of different kinds meet.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

// Collective: the message of every rank, in rank order. `what` is one line that says what this rank
// is about to do, as in "make its Reducer". Where the ranks are not all about to do the same:
// `own`, where this rank has an error of its own, else a MismatchError that says so. All are in
// step after it.
[[nodiscard]] std::vector<std::string> exchange_in_set_up(Communicator& world,
                                                          std::string_view what,
                                                          std::string_view message,
                                                          const std::exception_ptr& own = {});

}  // namespace hsdp::reducer
