// A rank through which others speak to rank 0: merges their messages into one for the parent, and
// passes answers down [Note: a tree of control links].
//
// It sends an exchange up as soon as all ranks below have spoken. If some are missing, it sends
// what it has after a tick or two, so rank 0 always knows who is missing. An exchange among only
// this rank and ranks below is answered here. Judgement is left to rank 0. Like ControlHub it does
// no I/O and has no thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/control_tree.h"
#include "hsdp/comm/control/frame_link.h"

namespace hsdp::comm {

class ControlRelay {
 public:
  struct Handlers {
    std::function<void(FrameType type, const std::string& body)> up;  // to the parent
    std::function<void(FrameType type, std::string_view body)> to_own;
  };

  ControlRelay(int rank, int size, Handlers handlers);

  // Adds a connected child. Until enter(), messages of children stay here.
  void add(int child, std::shared_ptr<FrameLink> link);
  // From now on this rank's own frames also come here. Children outside the tree are dropped.
  void enter(const ControlTree& tree);
  [[nodiscard]] bool entered() const { return entered_; }

  // From a child, or from this rank.
  void handle(int from, FrameType type, std::string_view body);
  void handle_from_parent(FrameType type, std::string_view body);
  void child_ended(int child);
  void tick(bool may_beat);
  // The world has ended, and the parent cannot report it.
  void end(const WorldEnd& world_end);
  [[nodiscard]] bool ended() const { return ended_; }
  // This rank exits in order, even if ranks below remain.
  void leave();
  void finish_sending();

  [[nodiscard]] bool all_closed() const;  // all ranks below have said goodbye or are gone
  [[nodiscard]] bool all_gone() const;

 private:
  struct Group {
    std::vector<int> members;
    std::size_t here = 0;  // members that are below, or this rank
    bool named = false;    // the parent knows it
  };
  struct Exchange {
    std::uint64_t group = 0;
    std::string key;
    bool while_open = false;
    std::set<int> came;
    std::vector<int> fresh;  // members whose words are still here
    Agreement agreement;     // of the fresh members
    std::set<int> from;      // children, or this rank, that get the answer
    bool passed_on = false;
    bool aged = false;  // a tick has passed
  };

  void add_group(int from, std::string_view body);
  void count_members(Group& group) const;
  void take(int from, MergedFrame frame);
  [[nodiscard]] bool settle(const std::string& name, Exchange& exchange);
  void pass_on(Exchange& exchange);
  void pass_on_words_of(int child);
  void answer(const Exchange& exchange, std::string_view body);
  void tell(int from, std::string_view body);
  void close(int rank);
  void send_to(int rank, FrameType type, std::string_view body);
  void send_to_all(FrameType type, std::string_view body);
  void fail(const WorldEnd& world_end);
  [[nodiscard]] bool is_closed(int child) const;

  int rank_;
  int size_;
  Handlers handlers_;
  bool entered_ = false;
  bool ended_ = false;
  std::map<int, std::shared_ptr<FrameLink>> children_;
  std::map<int, int> through_;  // rank below -> child that leads to it
  std::set<int> open_;          // ranks below that have not said goodbye
  std::map<std::uint64_t, Group> groups_;
  std::map<std::string, Exchange, std::less<>> exchanges_;
  std::map<int, BeatFrame> beats_;
};

}  // namespace hsdp::comm
