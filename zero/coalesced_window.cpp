#include "zero/coalesced_window.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"

namespace hsdp::zero {
namespace {

void require_distinct(const std::vector<Reducer*>& reducers) {
  const auto refuse = [](const std::string& got) {
    throw UsageError({.where = "zero: coalesced window",
                      .expected = "one Reducer or several, each once",
                      .got = got});
  };
  if (reducers.empty()) refuse("none");
  for (const Reducer* const reducer : reducers) {
    if (reducer == nullptr) refuse("a null pointer");
    if (std::ranges::count(reducers, reducer) > 1) refuse("one twice");
  }
}

void leave(const std::vector<Reducer*>& reducers, std::string_view reason) {
  for (Reducer* const reducer : reducers) ReducerInternal(*reducer).leave_window(reason);
}

// Also drops steps that have not begun here, as the other ranks may be in them.
void drop_steps(const std::vector<Reducer*>& reducers, const std::string& reason) {
  for (Reducer* const reducer : reducers) {
    try {
      if (!reducer->state().step_begun) reducer->begin_step();
      reducer->abandon_step(reason);
    } catch (const std::exception&) {
      // It is closed or has failed. The first error is more important.
    }
    ReducerInternal(*reducer).leave_window(reason);
  }
}

}  // namespace

void hear_drops(const std::vector<Reducer*>& reducers) {
  std::optional<StepAbortedError> first;
  bool is_known = false;
  for (Reducer* const reducer : reducers) {
    const bool was_dropped = reducer->state().step_dropped;
    std::optional<StepAbortedError> drop = ReducerInternal(*reducer).take_drop();
    if (!drop) {
      is_known = is_known || was_dropped;
    } else if (!first) {
      first = std::move(drop);
    }
  }
  if (first && !is_known) throw StepAbortedError(*first);
}

CoalescedWindow::CoalescedWindow(std::vector<Reducer*> reducers, const WindowOptions& options) {
  require_distinct(reducers);
  if (reducers.size() > 1) hear_drops(reducers);
  for (Reducer* const reducer : reducers) {
    try {
      reducer->begin_window(options);
    } catch (const std::exception& error) {
      if (reducers.size() > 1) {
        drop_steps(reducers,
                   std::string("a Reducer of its window could not begin: ") + error.what());
      }
      throw;
    }
  }
  open_ = std::move(reducers);
}

CoalescedWindow::~CoalescedWindow() {
  leave(open_, scope_.reason("its window was left without end()"));
}

void CoalescedWindow::end(std::int64_t backwards) {
  if (open_.empty()) {
    throw UsageError(
        {.where = "zero: coalesced window", .expected = "one end()", .got = "another"});
  }
  const std::vector<Reducer*> open = std::exchange(open_, {});
  try {  // if one refuses, no other may end with a result
    for (Reducer* const reducer : open) ReducerInternal(*reducer).check_window();
    for (Reducer* const reducer : open) reducer->end_window(backwards);
  } catch (const std::exception& error) {
    leave(open, error.what());
    throw;
  }
}

}  // namespace hsdp::zero
