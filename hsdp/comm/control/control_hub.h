// Rank 0's end of all control links: matches exchanges and judges failures for the whole world.
// Ranks speak to it directly or, in large worlds, through each other
// [Note: a tree of control links].
//
// It does no I/O and has no thread: the owner passes in messages and the time, one call at a time,
// and it sends over links. Rank 0 is a peer without a link: its frames arrive through handle(0, ..)
// and leave through `to_own`. After the first failure it relays nothing more.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/frame_link.h"
#include "hsdp/comm/control/own_clock.h"
#include "hsdp/comm/control/world_end.h"

namespace hsdp::comm {

class ControlHub {
 public:
  struct Options {
    JoinFrame own;               // what joining ranks must agree with
    std::string welcome_secret;  // for ranks that have none
    std::chrono::milliseconds timeout;
    // Why knocking ranks are not admitted, or "": for the message about missing ranks.
    std::function<std::string()> trouble_at_door;
  };
  using FrameHandler = std::function<void(FrameType type, std::string_view body)>;

  ControlHub(const OwnClock& clock, Options options, FrameHandler to_own);

  [[nodiscard]] bool admits(const JoinFrame& join) const { return !objection(join); }
  // Admits a rank, or refuses it and says why.
  void join(std::shared_ptr<FrameLink> link, const JoinFrame& join);
  void welcome_if_complete();
  void handle(int rank, FrameType type, std::string_view body);
  void heard(int rank);  // a sign of life
  // The rank's link broke, which does not end its process; the rank's process ended.
  void link_broke(int rank, const std::string& reason);
  void process_ended(int rank) { lost(rank, "its process ended"); }
  void tick();
  // Ends the world; the first reason counts.
  void end(WorldEnd world_end);
  // Rank 0 exits in order: tells the others and stops relaying.
  void leave();
  void finish_sending();

  [[nodiscard]] bool all_joined() const { return welcomed_; }
  [[nodiscard]] bool ended() const { return ended_.has_value(); }
  // The name of another job whose ranks called here last; "" if there was none.
  [[nodiscard]] const std::string& other_job() const { return other_job_; }
  // Whether no other rank has anything left to send or receive.
  [[nodiscard]] bool all_gone() const;
  [[nodiscard]] bool all_closed() const;  // said goodbye, or gone
  [[nodiscard]] std::vector<int> missing() const;

 private:
  enum class Phase : std::uint8_t { kAwaited, kJoined, kClosed };
  struct Peer {
    Phase phase = Phase::kAwaited;
    std::shared_ptr<FrameLink> link;  // null: it speaks through its parent
    int parent = 0;
    int closed_by = -1;  // the rank that left and cut this one off; -1: none
    std::string host;
    std::string process;
    std::string vanished;  // why its connection ended before the welcome; empty once it is back
    std::chrono::milliseconds last_heard{0};
    std::int64_t beat_count = 0;
    std::vector<BeatWait> waits;  // from the last beat
  };
  struct Exchange {
    std::uint64_t hash = 0;
    std::uint64_t group = 0;
    std::vector<bool> came;  // per member
    std::size_t missing_count = 0;
    // The ranks that spoke for the members and get the answer, this process last.
    std::set<int, std::greater<>> from;
    Agreement agreement;
    bool while_open = false;
  };

  [[nodiscard]] std::optional<WorldEnd> objection(const JoinFrame& join) const;
  [[nodiscard]] bool is_of_this_job(const JoinFrame& join) const;
  void refuse(std::shared_ptr<FrameLink> link, const WorldEnd& problem);
  void add_group(int rank, std::string_view body);
  void post(int rank, std::string_view body);
  void take(int from, const MergedFrame& frame);
  void answer(const Exchange& exchange, std::string name, std::optional<Agreement> agreement);
  void move(int rank, std::string_view body);
  void close(int rank);
  void close_below(int rank);
  void pass_on(int rank, std::string_view body);
  void take_beat(int rank, BeatFrame beat);
  void handle_relayed(int from, std::string_view body);
  [[nodiscard]] int highest_above(int rank) const;
  [[nodiscard]] bool speaks_through(int rank, int other) const;
  [[nodiscard]] bool is_rank(int rank) const { return rank >= 0 && rank < options_.own.size; }
  void send(int rank, const FrameBytes& frame);
  void send_beats();
  void lost(int rank, const std::string& reason);
  void judge_vanished();
  [[nodiscard]] std::vector<int> missing_in(const Exchange& exchange) const;
  [[nodiscard]] std::vector<RankReport> reports() const;
  void judge_waits_on_closed(const std::vector<RankReport>& reports);

  const OwnClock& clock_;
  Options options_;
  FrameHandler to_own_;
  std::chrono::milliseconds started_;
  bool welcomed_ = false;
  bool left_ = false;
  std::optional<WorldEnd> ended_;
  std::vector<Peer> peers_;
  std::deque<std::shared_ptr<FrameLink>> refused_;  // until they have read the reason
  std::string other_job_;
  std::map<std::uint64_t, std::vector<int>> groups_;  // ascending members, by id
  std::map<std::string, Exchange, std::less<>> exchanges_;
  std::map<std::uint64_t, std::string> exchange_names_;  // by hash
  // (waiting rank, wait id) -> the beat from which it has waited for a rank that said goodbye.
  std::map<std::pair<int, std::uint32_t>, std::int64_t> waits_on_closed_;
};

}  // namespace hsdp::comm
