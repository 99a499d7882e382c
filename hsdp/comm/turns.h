// Which lane's turn it is to issue a collective, on one rank: turns that were told, and then a
// record of them, again and again, without another word [Note: recorded turns].
//
// Pure state; one thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace hsdp::comm {

class Turns {
 public:
  static constexpr std::int64_t kMostRecorded = std::int64_t{1} << 16;

  // The next turns after all that were told.
  void tell(int lane, std::int64_t count);
  // After these come the last `length` of them again and again, until end_at().
  void follow(std::int64_t length);
  [[nodiscard]] bool follows() const { return !record_.empty(); }
  // Whether the next turn is a recorded one, which may have no task here yet.
  [[nodiscard]] bool is_recorded() const { return follows() && taken_ >= begin_; }

  // Whose turn is next, if that is known.
  [[nodiscard]] std::optional<int> next() const;
  void take();
  // How many turns were taken.
  [[nodiscard]] std::int64_t taken() const { return taken_; }

  // No recorded turn is next any more, until there was an end_at() for each call.
  void freeze() { ++freezes_; }
  [[nodiscard]] bool is_frozen() const { return freezes_ > 0; }
  // The record was followed until so many turns were taken in all, or will be: what is left until
  // then counts as told. Returns how many recorded turns that are for each lane, since follow().
  std::map<int, std::int64_t> end_at(std::int64_t taken);
  // How often the record has come again since follow().
  [[nodiscard]] std::int64_t rounds() const {
    return is_recorded() ? (taken_ - begin_) / std::ssize(record_) : 0;
  }

 private:
  [[nodiscard]] int recorded(std::int64_t turn) const;

  std::deque<int> told_;     // and not taken
  std::deque<int> history_;  // the last that were told
  std::int64_t taken_ = 0;
  std::int64_t known_ = 0;  // turns that were told, or followed
  std::vector<int> record_;
  std::int64_t begin_ = 0;  // of the recorded ones
  int freezes_ = 0;
};

// The steps of the lane that ends them, in turns of each lane: the first rank has the last one
// repeated when it was like those before. Where that turns out to be wrong it wants more of them.
class StepRecord {
 public:
  // A turn was chosen. Returns the length of the record to follow from here on, or 0.
  std::int64_t add(int lane, bool ends_step);
  // Begins anew, as lanes have come or gone.
  void restart();
  // The record that came again `rounds` times held no longer.
  void broke(std::int64_t rounds);
  // What is not repeated costs a step there: many are to be equal before.
  void distrust() { wanted_ = kMostEqual; }

 private:
  static constexpr int kMostEqual = 1 << 10;
  static constexpr std::int64_t kLong = 32;  // rounds, for each equal step that was wanted

  int ending_lane_ = -1;  // the lowest that has ended a step
  std::map<int, std::int64_t> counts_;
  std::map<int, std::int64_t> before_;
  std::int64_t length_ = 0;
  int equal_ = 0;   // steps in a row
  int wanted_ = 1;  // of them
};

}  // namespace hsdp::comm
