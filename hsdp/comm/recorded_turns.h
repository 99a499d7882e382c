// How the ranks of an IssueOrder come to repeat the turns of a step, and how they stop: what each
// rank says to the first one, and what the first one says to all [Note: recorded turns].
//
// The state of one rank; what it says goes out by a function. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "hsdp/comm/turns.h"

namespace hsdp::comm {

class RecordedTurns {
 public:
  // What a message says in place of a lane's number.
  enum Word : int {
    kFollow = -1,    // the last `count` turns come again and again
    kStop = -2,      // to the first rank: what has come here is not to be repeated
    kFreeze = -3,    // take no recorded turn more, and say how many turns were taken
    kTaken = -4,     // `count` turns were
    kEnd = -5,       // of the record, when `count` turns were taken
    kGone = -6,      // the last lane is, and `count` turns were taken
    kHere = -7,      // the task of the turn after `count` is
    kAllHere = -8,   // it is on every rank
    kDistrust = -9,  // to the first rank
  };
  // Tasks of one lane: how many there are, or how many come next. Or a word and its number.
  struct LaneCount {
    int lane = 0;
    std::int64_t count = 0;
  };
  struct Setting {
    std::vector<int> members;  // world ranks, of which the first chooses
    bool is_first = false;     // this rank
    // The first rank says it to all others, another one to the first.
    std::function<void(const std::vector<LaneCount>& entries)> say;
    // A lane has got so many turns by a record that ends.
    std::function<void(int lane, std::int64_t turns)> count;
  };
  explicit RecordedTurns(Setting setting) : setting_(std::move(setting)) {}

  [[nodiscard]] const Turns& turns() const { return turns_; }
  void take() { turns_.take(); }
  // What the first rank has chosen: so many turns of a lane, or kFollow.
  void tell(const LaneCount& entry);
  // First rank: a turn was chosen. Returns the length of the record to follow from here on, or 0.
  [[nodiscard]] std::int64_t choose(int lane, bool ends_step);
  // First rank: steps are compared anew.
  void restart() { steps_.restart(); }

  // The record does not hold here.
  void ask_to_stop();
  // A record has cost a step: steps are to be equal for long before the next one.
  void distrust();
  [[nodiscard]] bool asked_to_stop() const { return asked_to_stop_; }
  // This rank's last lane is gone.
  void leave();
  // Of the next recorded turn, which no rank takes before all have its task: this one has. False:
  // it has said so before.
  bool meet();
  [[nodiscard]] bool has_met() const { return met_ == turns_.taken(); }

  // What another rank says of a record. False: it is about something else.
  bool hear(int from, const LaneCount& entry);
  // Once this rank has asked for the end of a record, or takes no turn of it more: who has not said
  // how far it is, by world rank. In meet(): who is not there.
  [[nodiscard]] std::optional<int> awaited() const;
  // First rank: some have not.
  [[nodiscard]] bool is_stopping() const { return stopping_; }

  // A lane is being added, which ends a record in its own way. Where there were not several, turns
  // begin anew.
  void begin_adding(bool were_several);
  // `furthest`: on the first rank, where there were several: the turns that any rank has taken.
  void end_adding(std::optional<std::int64_t> furthest);

 private:
  void begin_stop();
  void add_taken(int by, std::int64_t taken);
  void end(std::int64_t taken);
  void add_here(int by, std::int64_t taken);

  const Setting setting_;
  Turns turns_;
  bool asked_to_stop_ = false;
  bool adding_ = false;
  std::int64_t said_here_ = -1;  // of the turn after so many
  std::int64_t met_ = -1;        // likewise
  // The first rank's:
  StepRecord steps_;
  bool stopping_ = false;                 // it waits until it knows of all
  std::map<int, std::int64_t> taken_by_;  // turns that ranks have taken, by world rank
  std::int64_t here_turn_ = -1;           // the last one before which ranks have met
  std::set<int> here_;                    // who was there, by world rank
};

}  // namespace hsdp::comm
