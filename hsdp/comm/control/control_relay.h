// A rank through which others speak to rank 0: merges what they say, so that one message goes up
// for all of them, and hands down what comes back [Note: a tree of control links].
//
// What all that are below it have said in an exchange goes up at once; where some are missing, what
// there is goes up after a tick or two, so rank 0 always knows who has not come. An exchange whose
// members are all below it, or itself, it answers. It judges nothing: that is rank 0's. Like
// ControlHub it does no I/O and has no thread.
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

  // A child has connected. Until enter() all that children say stays here.
  void add(int child, std::shared_ptr<FrameLink> link);
  // From now on this rank's own frames come here, too. Children that are not in the tree are let
  // go.
  void enter(const ControlTree& tree);
  [[nodiscard]] bool entered() const { return entered_; }

  // Of a child, or of this rank.
  void handle(int from, FrameType type, std::string_view body);
  void handle_from_parent(FrameType type, std::string_view body);
  void child_ended(int child);
  // Beats go up only if `may_beat`.
  void tick(bool may_beat);
  // The world has ended, and the parent cannot say so.
  void end(const WorldEnd& world_end);
  [[nodiscard]] bool ended() const { return ended_; }
  // This rank leaves in order, whoever is left below.
  void leave();
  void finish_sending();

  [[nodiscard]] bool all_closed() const;  // below: said goodbye, or gone
  [[nodiscard]] bool all_gone() const;

 private:
  struct Group {
    std::vector<int> members;
    std::size_t here = 0;  // of them, below or this rank
    bool named = false;    // to the parent
  };
  struct Exchange {
    std::uint64_t group = 0;
    std::string key;
    bool while_open = false;
    std::set<int> came;
    std::vector<int> fresh;  // of these, whose words are still here
    Agreement agreement;     // of the fresh
    std::set<int> from;      // children, or this rank: whom to answer
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
  std::map<int, int> through_;  // rank below -> child
  std::set<int> open_;          // ranks below that have not said goodbye
  std::map<std::uint64_t, Group> groups_;
  std::map<std::string, Exchange, std::less<>> exchanges_;
  std::map<int, BeatFrame> beats_;
};

}  // namespace hsdp::comm
