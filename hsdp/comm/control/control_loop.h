// The I/O thread of one rank's control connection: the hub, on rank 0, or the link to rank 0 or to
// a rank between; links of ranks that speak through this one; heartbeats; descriptor passing; and
// an orderly, bounded end.
//
// send(), fail(), stop() and the other public calls may come from any thread and never block, but
// for stop(), which is bounded.
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

  // One of these two, once. `listener` stays the caller's until stop_listening() or stop();
  // -1: a world of one.
  void start_as_hub(int listener, const std::string& secret, const std::string& welcome_secret);
  void start_as_rank(UniqueFd socket);
  // The link to rank 0 ended before rank 0 said anything about it.
  [[nodiscard]] bool lost_hub() const { return lost_hub_; }
  void stop_listening();  // waits until the I/O thread has let go of the listener

  void send(FrameType type, std::string body);
  void fail(const WorldEnd& world_end);
  void run_callbacks_soon();
  // The tree of control links [Note: a tree of control links]. Takes a listener for those that are
  // to speak through this rank; then the socket to the one through which it will speak: whether
  // that one has taken it is known before `end`. Then all ranks enter the same tree.
  void lead_children(UniqueFd listener, std::vector<int> children);
  [[nodiscard]] bool follow_parent(UniqueFd socket, int parent,
                                   std::chrono::steady_clock::time_point end);
  void enter_tree(const ControlTree& tree);
  // Descriptor passing: as the leader of `local_ranks`, or as one of the others.
  void lead_descriptors(UniqueFd listener, std::vector<int> local_ranks);
  void follow_descriptors(UniqueFd socket, int leader);
  void send_descriptor(std::string exchange, UniqueFd fd);

  // Says goodbye or flushes the failure, then ends the thread: about 2 s at most.
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
  // Rank 0.
  std::unique_ptr<ControlHub> hub_;
  std::map<int, ProcessWatch> watches_;  // of ranks that speak to this one, on this host
  std::unique_ptr<JoinListener> listener_;
  bool door_is_tcp_ = false;
  // The others.
  std::shared_ptr<ControlLink> link_;       // to the parent
  std::shared_ptr<ControlLink> next_link_;  // to the one in the tree, until it is entered
  std::unique_ptr<ProcessWatch> parent_watch_;
  std::atomic<bool> lost_hub_{false};
  // Those through which others speak.
  std::unique_ptr<ControlRelay> relay_;
  UniqueFd children_door_;
  ControlTree tree_;  // once it is entered

  std::unique_ptr<DescriptorBroker> broker_;
  std::shared_ptr<DescriptorChannel> descriptors_;
  std::unique_ptr<ProcessWatch> leader_watch_;

  enum class Stop : std::uint8_t { kNo, kWaiting, kFlushing };
  Stop stop_ = Stop::kNo;
  std::chrono::steady_clock::time_point stop_began_;
  std::thread thread_;
};

}  // namespace hsdp::comm
