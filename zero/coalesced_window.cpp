#include "zero/coalesced_window.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "hsdp/error.h"

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

void abandon(const std::vector<Reducer*>& reducers, const std::string& reason) {
  for (Reducer* const reducer : reducers) reducer->abandon_step(reason);
}

}  // namespace

CoalescedWindow::CoalescedWindow(std::vector<Reducer*> reducers, const WindowOptions& options) {
  require_distinct(reducers);
  for (Reducer* const reducer : reducers) {
    try {
      reducer->begin_window(options);
    } catch (const std::exception& error) {
      abandon(open_, std::string("another Reducer of its window could not begin: ") + error.what());
      throw;
    }
    open_.push_back(reducer);
  }
}

CoalescedWindow::~CoalescedWindow() { abandon(open_, "its window's block raised an exception"); }

void CoalescedWindow::end(std::int64_t backwards) {
  if (open_.empty()) {
    throw UsageError(
        {.where = "zero: coalesced window", .expected = "one end()", .got = "another"});
  }
  const std::vector<Reducer*> open = std::exchange(open_, {});
  try {  // what one of them refuses must not leave a result of another
    for (Reducer* const reducer : open) reducer->check_window();
    for (Reducer* const reducer : open) reducer->end_window(backwards);
  } catch (const std::exception& error) {
    abandon(open, error.what());
    throw;
  }
}

}  // namespace hsdp::zero
