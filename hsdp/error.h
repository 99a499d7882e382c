// Exceptions of the library.
//
// Messages read `component: what failed: expected X, got Y; remedy`, in lower case
// [Note: messages]; a Message holds these parts. The four errors that concern peers hold the ranks
// at fault and name them, as (rank r of n).
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hsdp {

// The parts of "where: expected X, got Y; remedy".
struct Message {
  std::string where{};  // "reducer: gradient of 'w'"
  std::string expected{};
  std::string got{};
  std::string remedy{};  // what to do, unless it is obvious

  [[nodiscard]] std::string text() const {
    return where + ": expected " + expected + ", got " + got +
           (remedy.empty() ? "" : "; " + remedy);
  }
};

// Base of all exceptions of the library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  explicit Error(const Message& message) : std::runtime_error(message.text()) {}
};

// Base of the errors that name ranks at fault. `ranks()` are job ranks; the message counts mesh
// ranks. In a mesh of some of the job's ranks they differ.
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

// A peer did not arrive, or sent no heartbeat, within the mesh's timeout.
class TimeoutError : public RankError {
 public:
  using RankError::RankError;
};

// The ranks did not agree: different calls, counts, shapes, factors or sync modes.
class MismatchError : public RankError {
 public:
  using RankError::RankError;
};

// Another rank dropped the step, or failed to set up the Reducer. It failed on every rank, and all
// may try again.
class StepAbortedError : public RankError {
 public:
  using RankError::RankError;
};

// The caller violated the interface: bad shape, dtype, name, order of calls.
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
