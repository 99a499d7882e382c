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
      abandon(open_,
              std::string("another Reducer of the window could not begin it: ") + error.what());
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
  std::vector<Reducer*> open = std::exchange(open_, {});
  while (!open.empty()) {
    Reducer* const reducer = open.front();
    open.erase(open.begin());
    try {
      reducer->end_window(backwards);
    } catch (const std::exception& error) {
      abandon(open, std::string("another Reducer of the window dropped the step: ") + error.what());
      throw;
    }
  }
}

}  // namespace hsdp::zero
