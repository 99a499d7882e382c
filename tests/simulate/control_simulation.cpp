#include "tests/simulate/control_simulation.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/status_word.h"

namespace hsdp::simulate {

using comm::ControlMember;
using comm::ControlState;
using comm::FrameBytes;
using comm::FrameType;

namespace {

constexpr std::int64_t kTickUs = 1'000 * comm::OwnClock::kTick.count();
constexpr std::int64_t kPromisedUs = 2'000'000;
// How long after the end of a process its peers see their connections close; up to twice that.
constexpr std::int64_t kSeenAfterUs = 1'000;
constexpr comm::WaitState kWaiting{.operation = "status"};

std::string word_key(int word) { return "reducer/word/" + std::to_string(word); }

// The status word of a Reducer with an optimizer.
reducer::StatusWord word_of(int rank, int word, bool equal) {
  return {.call = reducer::kMicrobatchCall,
          .step = word,
          .groups = {{.sync = Sync::kAll}},
          .loss_scale = equal ? 65'536.0 : 1.0 + rank,
          .sections = {"#0123456789abcdef"}};
}

}  // namespace

struct ControlSimulation::Node {
  std::shared_ptr<ControlState> state;
  std::unique_ptr<ControlMember> member;
  std::unique_ptr<comm::ControlRelay> relay;
  bool lives = true;
  std::int64_t busy_until_us = 0;
  int words = 0;  // words answered
  int slot = -1;  // begin_wait()'s slot while it waits for the next one
  bool waits = false;
};

class ControlSimulation::ChildLink final : public comm::FrameLink {
 public:
  ChildLink(ControlSimulation& simulation, int parent, int child)
      : simulation_(simulation), parent_(parent), child_(child) {}
  void send(FrameBytes frame) override { simulation_.send(parent_, child_, std::move(frame)); }
  [[nodiscard]] bool idle() const override { return true; }
  [[nodiscard]] bool open() const override { return simulation_.node(child_).lives; }
  void finish_sending() override {}
  void close() override {}

 private:
  ControlSimulation& simulation_;
  int parent_;
  int child_;
};

ControlSimulation::ControlSimulation(Options options)
    : options_(std::move(options)),
      random_(options_.seed),
      posted_us_(static_cast<std::size_t>(options_.words)) {
  const int size = options_.size();
  everyone_.resize(static_cast<std::size_t>(size));
  std::iota(everyone_.begin(), everyone_.end(), 0);
  world_id_ = comm::group_id(everyone_);
  outcome_.ends.resize(static_cast<std::size_t>(size));
  std::vector<std::string> hosts;
  for (const int rank : everyone_) hosts.push_back(std::to_string(rank / options_.ranks_per_host));
  tree_ = comm::ControlTree(hosts, options_.fan_out);
  for (int rank = 0; rank < size; ++rank) {
    auto made = std::make_unique<Node>();
    made->state = std::make_shared<ControlState>(now_ms, this);
    made->member = std::make_unique<ControlMember>(
        made->state, rank, size, options_.timeout,
        ControlMember::Handlers{
            [this, rank](FrameType type, const std::string& body) { to_hub(rank, type, body); },
            [] {},
            [node = made.get()](const comm::WorldEnd& world_end) {
              if (node->relay) node->relay->end(world_end);
            }});
    nodes_.push_back(std::move(made));
  }
  comm::JoinFrame own{.size = size, .host = "0"};
  hub_ = std::make_unique<comm::ControlHub>(
      node(0).state->clock(),
      comm::ControlHub::Options{own, "", options_.timeout, [] { return std::string(); }},
      [this](FrameType type, std::string_view body) { node(0).member->frame(type, body); });
  for (own.rank = 1; own.rank < size; ++own.rank) {
    own.host = hosts[static_cast<std::size_t>(own.rank)];
    hub_->join(std::make_shared<ChildLink>(*this, 0, own.rank), own);
  }
  enter_tree();
  for (int rank = 0; rank < size; ++rank) {
    to_hub(rank, FrameType::kGroup, comm::GroupFrame{everyone_}.encode());
  }
  setting_up_ = false;
  for (int rank = 1; rank < size; ++rank) {
    const int parent = tree_.parent(rank);
    outcome_.links[rank] = {.parent = parent,
                            .depth = parent == 0 ? 1 : outcome_.links.at(parent).depth + 1};
  }
  for (int rank = 0; rank < size; ++rank) {
    at(up_to_twice(kTickUs) - kTickUs, [this, rank] { tick(rank); });
    at(up_to_twice(options_.compute_us), [this, rank] { post(rank); });
  }
}

ControlSimulation::~ControlSimulation() = default;

void ControlSimulation::enter_tree() {
  for (int rank = 1; rank < options_.size(); ++rank) {
    const std::vector<int> children = tree_.children(rank);
    if (!children.empty()) {
      node(rank).relay = std::make_unique<comm::ControlRelay>(
          rank, options_.size(),
          comm::ControlRelay::Handlers{[this, rank](FrameType type, const std::string& body) {
                                         send(rank, tree_.parent(rank),
                                              comm::make_frame(type, body));
                                       },
                                       [this, rank](FrameType type, std::string_view body) {
                                         node(rank).member->frame(type, body);
                                       }});
      for (const int child : children) {
        node(rank).relay->add(child, std::make_shared<ChildLink>(*this, rank, child));
      }
      node(rank).relay->enter(tree_);
    }
    const int parent = tree_.parent(rank);
    if (parent == 0) continue;
    hub_->handle(rank, FrameType::kMoved, comm::rank_body(parent));
    node(rank).member->set_parent(parent);
  }
}

const std::string& ControlSimulation::word_name(int word) {
  auto& name = names_[word];
  if (name.empty()) name = comm::exchange_name(word_key(word), world_id_);
  return name;
}

void ControlSimulation::at(std::int64_t us, std::function<void()> act) {
  events_.push({us, made_++, std::move(act)});
}

std::int64_t ControlSimulation::up_to_twice(std::int64_t us) {
  return us + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(us + 1));
}

void ControlSimulation::send(int from, int to, FrameBytes frame) {
  if (setting_up_) return receive(from, to, frame);
  if (!node(from).lives) return;
  const FrameType type = comm::type_of(*frame);
  if (type != FrameType::kBeat && type != FrameType::kBeats) {
    const bool is_down = tree_.parent(to) == from;
    LinkLoad& link = outcome_.links[is_down ? to : from];
    ++(is_down ? link.messages_out : link.messages_in);
    (is_down ? link.bytes_out : link.bytes_in) += static_cast<std::int64_t>(frame->size());
  }
  const std::int64_t takes =
      options_.message_us + static_cast<std::int64_t>(frame->size()) / options_.bytes_per_us;
  std::int64_t& busy = node(from).busy_until_us;
  busy = std::max(busy, now_us_) + takes;
  std::int64_t& arrival = last_arrival_us_[{from, to}];
  arrival = std::max(arrival, busy + up_to_twice(options_.hop_us));
  at(arrival, [this, from, to, takes, leaves = busy, frame = std::move(frame)] {
    // A message that had not left its process when that ended is lost.
    if (!node(from).lives && leaves > outcome_.killed_us) return;
    std::int64_t& receiver = node(to).busy_until_us;
    receiver = std::max(receiver, now_us_) + takes;
    at(receiver, [this, from, to, frame] { receive(from, to, frame); });
  });
}

void ControlSimulation::to_hub(int rank, FrameType type, const std::string& body) {
  if (rank == 0) return hub_->handle(0, type, body);
  if (node(rank).relay) return node(rank).relay->handle(rank, type, body);
  send(rank, tree_.parent(rank), comm::make_frame(type, body));
}

void ControlSimulation::receive(int from, int to, const FrameBytes& frame) {
  if (!node(to).lives) return;
  const FrameType type = comm::type_of(*frame);
  const std::string_view body = std::string_view(*frame).substr(comm::kFrameHeaderBytes);
  Node& own = node(to);
  if (to == 0) {
    hub_->handle(from, type, body);
  } else if (own.relay && from != tree_.parent(to)) {
    own.relay->handle(from, type, body);
  } else if (type != FrameType::kFail || to != options_.untold) {
    own.member->heard();
    own.relay ? own.relay->handle_from_parent(type, body) : own.member->frame(type, body);
  }
  look(to);
}

void ControlSimulation::tick(int rank) {
  Node& own = node(rank);
  if (!own.lives) return;
  own.state->clock().tick();
  const std::string beat = own.member->beat().encode();
  to_hub(rank, FrameType::kBeat, beat);
  if (own.relay) own.relay->tick(true);
  rank == 0 ? hub_->tick() : own.member->tick();
  look(rank);
  at(now_us_ + kTickUs, [this, rank] { tick(rank); });
}

void ControlSimulation::post(int rank) {
  Node& own = node(rank);
  if (!own.lives || own.state->failed() || own.words == options_.words) return;
  const comm::PostFrame frame{.group = world_id_,
                              .key = word_key(own.words),
                              .saying = word_of(rank, own.words, options_.equal_words).saying()};
  own.slot = own.state->begin_wait(kWaiting, comm::exchange_hash(word_name(own.words)));
  own.waits = true;
  posted_us_[static_cast<std::size_t>(own.words)] = now_us_;
  to_hub(rank, FrameType::kPost, frame.encode());
  look(rank);
}

// Checks whether the answer has come, or the world has ended.
void ControlSimulation::look(int rank) {
  Node& own = node(rank);
  auto& end = outcome_.ends[static_cast<std::size_t>(rank)];
  if (end || !own.lives) return;
  try {
    if (!own.waits) return own.state->throw_if_failed();
    const auto answer =
        own.state->take_within(word_name(own.words), kWaiting, std::chrono::milliseconds(0));
    if (!answer) return;
    comm::WireWriter said;
    answer->encode(said);
    const std::string all = said.take();
    const auto& first = answers_.try_emplace(own.words, all).first->second;
    if (first != all) second_answers_.push_back(word_key(own.words) + " has two answers");
    const auto word = static_cast<std::size_t>(own.words);
    outcome_.word_us.resize(std::max(outcome_.word_us.size(), word + 1));
    outcome_.word_us[word] = now_us_ - posted_us_[word];
    own.state->end_wait(own.slot);
    own.waits = false;
    ++own.words;
    at(now_us_ + up_to_twice(options_.compute_us), [this, rank] { post(rank); });
  } catch (const RankError& error) {
    end = RankEnd{now_us_, typeid(error).name(), error.what(), error.ranks()};
    at(now_us_ + up_to_twice(kSeenAfterUs), [this, rank] { leave(rank); });
  }
}

// Breaks the data links of a rank.
void ControlSimulation::leave(int rank) {
  for (const int peer :
       {rank - options_.ranks_per_host, (rank + options_.ranks_per_host) % options_.size()}) {
    const int at_peer = peer < 0 ? peer + options_.size() : peer;
    if (at_peer == rank) continue;
    at(now_us_ + up_to_twice(options_.hop_us),
       [this, at_peer, rank] { data_link_broke(at_peer, rank); });
  }
}

void ControlSimulation::data_link_broke(int rank, int peer) {
  at(now_us_ + 1'000 * options_.patience.count(), [this, rank, peer] {
    Node& own = node(rank);
    if (!own.lives || own.state->failed() || own.words == options_.words) return;
    own.member->fail(comm::end_by_loss(peer, options_.size(), "it closed the connection"));
    look(rank);
  });
}

void ControlSimulation::kill() {
  outcome_.killed_us = now_us_;
  for (const int rank : options_.killed) node(rank).lives = false;
  for (const int rank : options_.killed) {
    leave(rank);
    const int parent = tree_.parent(rank);
    if (parent >= 0) {
      at(now_us_ + up_to_twice(kSeenAfterUs), [this, parent, rank] { child_closed(parent, rank); });
    }
    for (const int child : tree_.children(rank)) {
      at(now_us_ + up_to_twice(kSeenAfterUs), [this, rank, child] { parent_closed(child, rank); });
    }
  }
}

void ControlSimulation::child_closed(int parent, int child) {
  if (!node(parent).lives) return;
  if (parent != 0) {
    node(parent).relay->child_ended(child);
  } else if (same_host(parent, child)) {
    hub_->process_ended(child);
  } else {
    hub_->link_broke(child, "end of file");
  }
  look(parent);
}

void ControlSimulation::parent_closed(int rank, int parent) {
  if (!node(rank).lives) return;
  node(rank).member->parent_closed(same_host(rank, parent) ? "its process ended"
                                                           : "its connection ended: end of file");
  look(rank);
}

bool ControlSimulation::is_over() const {
  return std::ranges::all_of(nodes_, [&](const std::unique_ptr<Node>& node) {
    const auto rank = static_cast<std::size_t>(&node - nodes_.data());
    const bool is_done = outcome_.killed_us < 0 && node->words == options_.words;
    return !node->lives || outcome_.ends[rank] || is_done;
  });
}

Outcome ControlSimulation::run() {
  const std::int64_t most_us =
      1'000 * options_.timeout.count() + 2 * kPromisedUs;  // after the kill
  while (!events_.empty() && !is_over()) {
    if (outcome_.events == options_.kill_at) kill();
    if (outcome_.killed_us >= 0 && now_us_ - outcome_.killed_us > most_us) break;
    const Event next = events_.top();
    events_.pop();
    now_us_ = next.at_us;
    next.act();
    ++outcome_.events;
  }
  outcome_.end_us = now_us_;
  outcome_.broken_promises = broken_promises();
  return outcome_;
}

// Whether the rank, one between it and rank 0, or rank 0 itself has died.
bool ControlSimulation::is_cut_off(int rank) const {
  while (rank > 0 && nodes_[static_cast<std::size_t>(rank)]->lives) rank = tree_.parent(rank);
  return !nodes_[static_cast<std::size_t>(rank)]->lives;
}

// The promises: every survivor raises within 2 s. Survivors that still reach rank 0 raise the same
// kind of error and name the same ranks. Errors name only dead ranks. A word has one answer.
std::vector<std::string> ControlSimulation::broken_promises() const {
  std::vector<std::string> broken = second_answers_;
  const RankEnd* first = nullptr;
  for (std::size_t rank = 0; rank < nodes_.size(); ++rank) {
    const std::string who = "rank " + std::to_string(rank);
    const auto& end = outcome_.ends[rank];
    const bool is_done = outcome_.killed_us < 0 && nodes_[rank]->words == options_.words;
    if (!nodes_[rank]->lives || (is_done && !end)) continue;
    if (!end || (outcome_.killed_us >= 0 && end->at_us - outcome_.killed_us > kPromisedUs)) {
      broken.push_back(who + " does not raise within 2 s");
      continue;
    }
    for (const int named : end->ranks) {
      if (std::ranges::find(options_.killed, named) == options_.killed.end()) {
        broken.push_back(who + " names rank " + std::to_string(named) + ", which lives");
      }
    }
    if (end->ranks.empty()) broken.push_back(who + " names nobody");
    if (is_cut_off(static_cast<int>(rank))) continue;
    if (first == nullptr) first = &*end;
    if (end->ranks != first->ranks || end->kind != first->kind) {
      broken.push_back(who + " raises another error than others do");
    }
  }
  return broken;
}

}  // namespace hsdp::simulate
