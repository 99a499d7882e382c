// Simulates a world of any size in one thread and virtual time. It runs the real hub, relays and
// members of the control plane over links whose messages take time. Ranks exchange status words,
// and processes are killed. Each rank also has a data link to a rank of the next host, which breaks
// when either process ends; a rank whose world has ended leaves.
//
// A message occupies its sender and its receiver for `message_us` each, plus a microsecond per
// `bytes_per_us`; each handles one message at a time. Between them it takes `hop_us`, or up to
// twice that, as the seed decides. Messages on one link keep their order. The same options and seed
// give the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "hsdp/comm/control/control_hub.h"
#include "hsdp/comm/control/control_member.h"
#include "hsdp/comm/control/control_relay.h"
#include "hsdp/comm/control/control_tree.h"

namespace hsdp::simulate {

struct Options {
  int hosts = 1;
  int ranks_per_host = 8;
  int words = 10;
  bool equal_words = true;  // else each rank sends a different word
  int fan_out = comm::ControlTree::kFanOut;
  std::int64_t message_us = 5;
  std::int64_t bytes_per_us = 1'500;
  std::int64_t hop_us = 20;
  std::int64_t compute_us = 2'000;  // between two words of a rank, up to twice that
  std::chrono::milliseconds timeout{30'000};
  // How long a rank waits for the reason when a data link breaks, like TcpChannel.
  std::chrono::milliseconds patience{1'000};
  std::uint64_t seed = 1;
  // The processes of the `killed` ranks end before event `kill_at`.
  std::int64_t kill_at = -1;
  std::vector<int> killed;
  // A planted fault: this rank never hears that the world has ended.
  int untold = -1;

  [[nodiscard]] int size() const { return hosts * ranks_per_host; }
};

// What a rank's link to its parent carried, seen from the parent; heartbeats are not counted.
struct LinkLoad {
  int parent = 0;
  int depth = 1;  // of the rank; at 1 it is linked to rank 0 directly
  std::int64_t messages_out = 0;
  std::int64_t bytes_out = 0;
  std::int64_t messages_in = 0;
  std::int64_t bytes_in = 0;
};

struct RankEnd {
  std::int64_t at_us = 0;
  std::string kind;  // type of the error
  std::string message;
  std::vector<int> ranks;
};

struct Outcome {
  std::int64_t events = 0;
  std::int64_t end_us = 0;
  std::int64_t killed_us = -1;
  std::map<int, LinkLoad> links;             // by rank
  std::vector<std::int64_t> word_us;         // from the last post of a word to its last answer
  std::vector<std::optional<RankEnd>> ends;  // by rank: how its world ended, if it did
  std::vector<std::string> broken_promises;  // see docs/scale.md
};

class ControlSimulation {
 public:
  explicit ControlSimulation(Options options);
  ~ControlSimulation();
  ControlSimulation(const ControlSimulation&) = delete;
  ControlSimulation& operator=(const ControlSimulation&) = delete;

  // Runs until all words are answered, or every survivor knows that the world has ended.
  [[nodiscard]] Outcome run();

 private:
  class ChildLink;
  struct Node;
  struct Event {
    std::int64_t at_us;
    std::int64_t number;  // events count up as they are made
    std::function<void()> act;
    friend bool operator<(const Event& a, const Event& b) {
      return std::pair(a.at_us, a.number) > std::pair(b.at_us, b.number);
    }
  };

  [[nodiscard]] static std::int64_t now_ms(const void* simulation) {
    return static_cast<const ControlSimulation*>(simulation)->now_us_ / 1'000;
  }
  // The name of the word's exchange.
  [[nodiscard]] const std::string& word_name(int word);
  void enter_tree();
  void at(std::int64_t us, std::function<void()> act);
  [[nodiscard]] std::int64_t up_to_twice(std::int64_t us);
  [[nodiscard]] Node& node(int rank) { return *nodes_[static_cast<std::size_t>(rank)]; }
  void send(int from, int to, comm::FrameBytes frame);
  void to_hub(int rank, comm::FrameType type, const std::string& body);
  void receive(int from, int to, const comm::FrameBytes& frame);
  void parent_closed(int rank, int parent);
  void child_closed(int parent, int child);
  void leave(int rank);
  void data_link_broke(int rank, int peer);
  [[nodiscard]] bool same_host(int a, int b) const {
    return a / options_.ranks_per_host == b / options_.ranks_per_host;
  }
  [[nodiscard]] bool is_cut_off(int rank) const;
  void tick(int rank);
  void post(int rank);
  void look(int rank);
  void kill();
  [[nodiscard]] bool is_over() const;
  [[nodiscard]] std::vector<std::string> broken_promises() const;

  Options options_;
  std::mt19937_64 random_;
  std::int64_t now_us_ = 0;
  std::int64_t made_ = 0;
  bool setting_up_ = true;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<Node>> nodes_;
  comm::ControlTree tree_;
  std::unique_ptr<comm::ControlHub> hub_;
  std::map<std::pair<int, int>, std::int64_t> last_arrival_us_;
  std::vector<int> everyone_;
  std::uint64_t world_id_ = 0;          // id of the group of all ranks
  std::map<int, std::string> names_;    // of the exchanges, by word
  std::map<int, std::string> answers_;  // the first answer to each word
  std::vector<std::string> second_answers_;
  std::vector<std::int64_t> posted_us_;
  Outcome outcome_;
};

}  // namespace hsdp::simulate
