// Exceptions of the library.
//
// Messages read `component: what failed: expected X, got Y; remedy`, in lower case
// [Note: messages]; a Message is the parts of one. The four errors that concern peers name the
// ranks at fault, as (rank r of n), and carry them.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hsdp {

// What an error says: "where: expected X, got Y; remedy".
struct Message {
  std::string where{};  // "reducer: gradient of 'w'"
  std::string expected{};
  std::string got{};
  std::string remedy{};  // what to do, where that is not plain

  [[nodiscard]] std::string text() const {
    return where + ": expected " + expected + ", got " + got +
           (remedy.empty() ? "" : "; " + remedy);
  }
};

// Base of everything the library throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  explicit Error(const Message& message) : std::runtime_error(message.text()) {}
};

// Base of the errors that name ranks at fault: ranks of the job, also where a mesh has some of them
// only and the text counts those.
class RankError : public Error {
 public:
  RankError(const std::string& message, std::vector<int> ranks)
      : Error(message), ranks_(std::move(ranks)) {}
  RankError(const Message& message, std::vector<int> ranks)
      : RankError(message.text(), std::move(ranks)) {}
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int> ranks_;
};

// A peer process ended or its link broke.
class PeerLostError : public RankError {
 public:
  using RankError::RankError;
};

// A peer did not arrive, or stopped beating, within the mesh's timeout.
class TimeoutError : public RankError {
 public:
  using RankError::RankError;
};

// The ranks did not agree: different calls, counts, shapes, factors or sync modes.
class MismatchError : public RankError {
 public:
  using RankError::RankError;
};

// Another rank dropped the step, or failed to set the Reducer up. No rank goes on with it, and all
// may try again.
class StepAbortedError : public RankError {
 public:
  using RankError::RankError;
};

// The caller broke a rule of the interface: bad shape, dtype, name, order of calls.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A snapshot could not be written, read or understood.
class SnapshotError : public Error {
 public:
  using Error::Error;
};

}  // namespace hsdp
