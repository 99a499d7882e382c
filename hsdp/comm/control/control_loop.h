// The I/O thread of one rank's control connection. It runs the hub on rank 0, or the link to the
// parent; links of ranks that speak through this one; heartbeats; descriptor passing; and an
// orderly, bounded exit.
//
// All public calls, such as send(), fail() and stop(), may come from any thread. They never block,
// except for stop(), whose wait is bounded.
#pragma once

#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "hsdp/comm/control/control_hub.h"
#include "hsdp/comm/control/control_link.h"
#include "hsdp/comm/control/control_member.h"
#include "hsdp/comm/control/control_relay.h"
#include "hsdp/comm/control/control_state.h"
#include "hsdp/comm/control/control_tree.h"
#include "hsdp/comm/control/descriptor_broker.h"
#include "hsdp/comm/control/process_watch.h"
#include "hsdp/comm/rendezvous/join_listener.h"

namespace hsdp::comm {

class ControlLoop {
 public:
  ControlLoop(std::shared_ptr<ControlState> state, JoinFrame own,
              std::chrono::milliseconds timeout);
  ~ControlLoop();  // stops
  ControlLoop(const ControlLoop&) = delete;
  ControlLoop& operator=(const ControlLoop&) = delete;

  // Call one of these two, once. The caller keeps `listener` until stop_listening() or stop(); -1:
  // a world of one rank.
  void start_as_hub(int listener, const std::string& secret, const std::string& welcome_secret);
  void start_as_rank(UniqueFd socket);
  // The link to rank 0 ended before rank 0 reported a failure.
  [[nodiscard]] bool lost_hub() const { return lost_hub_; }
  void stop_listening();  // waits until the I/O thread no longer uses the listener

  void send(FrameType type, std::string body);
  void fail(const WorldEnd& world_end);
  void run_callbacks_soon();
  // Builds the tree of control links [Note: a tree of control links]. First a listener for the
  // ranks that will speak through this one, then the socket to this rank's parent; follow_parent()
  // returns whether the parent accepted it before `end`. Then all ranks enter the same tree.
  void lead_children(UniqueFd listener, std::vector<int> children);
  [[nodiscard]] bool follow_parent(UniqueFd socket, int parent,
                                   std::chrono::steady_clock::time_point end);
  void enter_tree(const ControlTree& tree);
  // Passes descriptors, as the leader of `local_ranks` or as one of the others.
  void lead_descriptors(UniqueFd listener, std::vector<int> local_ranks);
  void follow_descriptors(UniqueFd socket, int leader);
  void send_descriptor(std::string exchange, UniqueFd fd);

  // Says goodbye or flushes the failure, then ends the thread, within about 2 s.
  void stop();

 private:
  using Millis = std::chrono::milliseconds;

  void start_thread();
  void run();
  void tick();
  void arm_tick();
  void admit(const std::shared_ptr<ControlLink>& link, const JoinFrame& join);
  void to_hub(FrameType type, const std::string& body);
  void from_parent(FrameType type, std::string_view body);
  void parent_closed(const std::string& reason);
  void watch_parent(ControlLink& link);
  void take_child(const std::shared_ptr<ControlLink>& link, const JoinFrame& join,
                  const std::vector<int>& expected);
  void tell_process_end(int rank);
  void leader_ended(int leader);
  [[nodiscard]] std::string trouble_at_door() const;
  void begin_stop();
  void continue_stop();
  [[nodiscard]] bool may_stop_sending() const;
  [[nodiscard]] bool all_gone() const;

  std::shared_ptr<ControlState> state_;
  JoinFrame own_;
  Millis timeout_;
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  boost::asio::steady_timer tick_timer_;
  boost::asio::steady_timer stop_timer_;
  ControlMember member_;
  // Only on rank 0.
  std::unique_ptr<ControlHub> hub_;
  std::map<int, ProcessWatch> watches_;  // ranks of this host that speak to this one
  std::unique_ptr<JoinListener> listener_;
  bool door_is_tcp_ = false;
  // Only on other ranks.
  std::shared_ptr<ControlLink> link_;       // to the parent
  std::shared_ptr<ControlLink> next_link_;  // to the parent in the tree, until the tree is entered
  std::unique_ptr<ProcessWatch> parent_watch_;
  std::atomic<bool> lost_hub_{false};
  // Only on ranks through which others speak.
  std::unique_ptr<ControlRelay> relay_;
  UniqueFd children_door_;
  ControlTree tree_;  // set when it is entered

  std::unique_ptr<DescriptorBroker> broker_;
  std::shared_ptr<DescriptorChannel> descriptors_;
  std::unique_ptr<ProcessWatch> leader_watch_;

  enum class Stop : std::uint8_t { kNo, kWaiting, kFlushing };
  Stop stop_ = Stop::kNo;
  std::chrono::steady_clock::time_point stop_began_;
  std::thread thread_;
};

}  // namespace hsdp::comm
