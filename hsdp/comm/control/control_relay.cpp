#include "hsdp/comm/control/control_relay.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/control/world_end.h"

namespace hsdp::comm {

ControlRelay::ControlRelay(int rank, int size, Handlers handlers)
    : rank_(rank), size_(size), handlers_(std::move(handlers)) {}

void ControlRelay::add(int child, std::shared_ptr<FrameLink> link) {
  children_[child] = std::move(link);
}

void ControlRelay::enter(const ControlTree& tree) {
  std::erase_if(children_, [&](const auto& entry) {
    const bool stays = tree.parent(entry.first) == rank_;
    if (!stays) entry.second->close();
    return !stays;
  });
  for (const auto& [child, _] : children_) {
    through_[child] = child;
    for (const int rank : tree.below(child)) through_[rank] = child;
  }
  for (const auto& [rank, _] : through_) open_.insert(rank);
  for (auto& [_, group] : groups_) count_members(group);
  entered_ = true;
  for (const auto& [child, link] : children_) {
    if (!link->open()) child_ended(child);  // before it could be told
  }
  for (auto next = exchanges_.begin(); next != exchanges_.end();) {
    next = settle(next->first, next->second) ? exchanges_.erase(next) : std::next(next);
  }
}

void ControlRelay::handle(int from, FrameType type, std::string_view body) {
  switch (type) {
    case FrameType::kGroup:
      return add_group(from, body);
    case FrameType::kPost: {
      auto post = PostFrame::decode(body);
      if (!post) return fail(end_by_malformed("exchange", from));
      MergedFrame merged{post->group, std::move(post->key), post->while_open, {from}, {}};
      merged.agreement.add(from, post->saying);
      return take(from, std::move(merged));
    }
    case FrameType::kMerged: {
      auto merged = MergedFrame::decode(body);
      return merged ? take(from, std::move(*merged)) : fail(end_by_malformed("exchange", from));
    }
    case FrameType::kBeat:
      if (auto beat = BeatFrame::decode(body)) beats_[from] = std::move(*beat);
      return;
    case FrameType::kBeats:
      if (auto all = BeatsFrame::decode(body)) {
        for (auto& [rank, beat] : all->beats) beats_[rank] = std::move(beat);
      }
      return;
    case FrameType::kTell:
      return tell(from, body);
    case FrameType::kGoodbye:
      return close(from);
    case FrameType::kRelayed: {
      const auto relayed = RelayedFrame::decode(body);
      if (relayed && relayed->type == FrameType::kTell) return tell(relayed->rank, relayed->body);
      if (relayed && relayed->type == FrameType::kGoodbye) return close(relayed->rank);
      return fail(end_by_malformed("message", from));
    }
    case FrameType::kFail:
    case FrameType::kProcessEnd:
      return handlers_.up(type, std::string(body));
    default:
      return fail(end_by_malformed("message", from));
  }
}

void ControlRelay::add_group(int from, std::string_view body) {
  auto frame = GroupFrame::decode(body);
  if (!frame || frame->members.empty() || frame->members.back() >= size_) {
    return fail(end_by_malformed("group", from));
  }
  const auto [place, is_new] = groups_.try_emplace(group_id(frame->members));
  if (!is_new) return;
  place->second.members = std::move(frame->members);
  count_members(place->second);
}

void ControlRelay::count_members(Group& group) const {
  group.here = static_cast<std::size_t>(std::ranges::count_if(
      group.members, [this](int rank) { return rank == rank_ || through_.contains(rank); }));
}

void ControlRelay::take(int from, MergedFrame frame) {
  if (ended_) return;
  const auto group = groups_.find(frame.group);
  if (group == groups_.end() || !std::ranges::includes(group->second.members, frame.ranks)) {
    return fail(end_by_malformed("exchange", from));
  }
  const std::string name = exchange_name(frame.key, frame.group);
  Exchange& exchange = exchanges_[name];
  exchange.group = frame.group;
  exchange.while_open = frame.while_open;
  for (const int rank : frame.ranks) {
    if (!exchange.came.insert(rank).second) {
      return fail(end_by_second_use(frame.key, rank));
    }
    exchange.fresh.push_back(rank);
  }
  exchange.key = std::move(frame.key);
  exchange.agreement.merge(frame.agreement);
  exchange.from.insert(from);
  if (settle(name, exchange)) exchanges_.erase(name);
}

// Returns true when the exchange is over.
bool ControlRelay::settle(const std::string& name, Exchange& exchange) {
  const Group& group = groups_.at(exchange.group);
  const bool all_came = exchange.came.size() >= group.here;
  if (!entered_ || (!all_came && !exchange.while_open)) return false;
  if (!all_came || exchange.passed_on || group.here < group.members.size()) {
    pass_on(exchange);
    return false;
  }
  exchange.agreement.close();
  answer(exchange, AnswerFrame{name, std::move(exchange.agreement)}.encode());
  return true;
}

void ControlRelay::pass_on(Exchange& exchange) {
  if (exchange.fresh.empty()) return;
  Group& group = groups_.at(exchange.group);
  if (!std::exchange(group.named, true)) {
    handlers_.up(FrameType::kGroup, GroupFrame{group.members}.encode());
  }
  std::ranges::sort(exchange.fresh);
  exchange.agreement.close();
  const MergedFrame frame{exchange.group, exchange.key, exchange.while_open,
                          std::exchange(exchange.fresh, {}), std::exchange(exchange.agreement, {})};
  exchange.passed_on = true;
  handlers_.up(FrameType::kMerged, frame.encode());
}

// Before rank 0 hears that `child` has left: what a rank has said counts.
void ControlRelay::pass_on_words_of(int child) {
  for (auto& [_, exchange] : exchanges_) {
    if (exchange.from.contains(child)) pass_on(exchange);
  }
}

// This process last: once its caller continues, all other answers are on their way.
void ControlRelay::answer(const Exchange& exchange, std::string_view body) {
  const FrameBytes frame = make_frame(FrameType::kAnswer, body);
  for (const int child : exchange.from) {
    const auto link = children_.find(child);
    if (link != children_.end()) link->second->send(frame);
  }
  if (exchange.from.contains(rank_)) handlers_.to_own(FrameType::kAnswer, body);
}

void ControlRelay::tell(int from, std::string_view body) {
  auto frame = TellFrame::decode(body);
  if (!frame) return fail(end_by_malformed("message", from));
  if (frame->peer != rank_ && !through_.contains(frame->peer)) {
    return handlers_.up(FrameType::kRelayed,
                        RelayedFrame{from, FrameType::kTell, std::string(body)}.encode());
  }
  const int receiver = std::exchange(frame->peer, from);
  send_to(receiver, FrameType::kTell, frame->encode());
}

void ControlRelay::close(int rank) {
  open_.erase(rank);
  const auto child = through_.find(rank);
  pass_on_words_of(child == through_.end() ? rank_ : child->second);
  if (rank == rank_) return handlers_.up(FrameType::kGoodbye, {});
  handlers_.up(FrameType::kRelayed, RelayedFrame{rank, FrameType::kGoodbye, {}}.encode());
  if (child != through_.end() && is_closed(child->second)) {
    children_.at(child->second)->finish_sending();
  }
}

bool ControlRelay::is_closed(int child) const {
  return std::ranges::none_of(open_, [&](int rank) { return through_.at(rank) == child; });
}

void ControlRelay::child_ended(int child) {
  const auto link = children_.find(child);
  if (link == children_.end()) return;  // not in this tree
  link->second->close();
  // Nothing more comes from the ranks that spoke through it, either.
  pass_on_words_of(child);
  if (!is_closed(child)) handlers_.up(FrameType::kProcessEnd, rank_body(child));
  std::erase_if(open_, [&](int rank) { return through_.at(rank) == child; });
}

void ControlRelay::handle_from_parent(FrameType type, std::string_view body) {
  switch (type) {
    case FrameType::kAnswer: {
      auto exchange = exchanges_.extract(AnswerFrame::exchange_of(body));
      if (exchange.empty()) return handlers_.to_own(type, body);  // from before enter()
      return answer(exchange.mapped(), body);
    }
    case FrameType::kRelayed: {
      const auto relayed = RelayedFrame::decode(body);
      if (relayed) send_to(relayed->rank, relayed->type, relayed->body);
      return;
    }
    case FrameType::kFail:
      if (auto world_end = WorldEnd::decode(body)) end(*world_end);
      return handlers_.to_own(type, body);
    case FrameType::kGoodbye:
      send_to_all(type, body);
      return handlers_.to_own(type, body);
    default:
      return handlers_.to_own(type, body);
  }
}

void ControlRelay::send_to(int rank, FrameType type, std::string_view body) {
  if (rank == rank_) return handlers_.to_own(type, body);
  const auto child = through_.find(rank);
  if (child == through_.end()) return;
  children_.at(child->second)
      ->send(child->second == rank
                 ? make_frame(type, body)
                 : make_frame(FrameType::kRelayed,
                              RelayedFrame{rank, type, std::string(body)}.encode()));
}

void ControlRelay::send_to_all(FrameType type, std::string_view body) {
  const FrameBytes frame = make_frame(type, body);
  for (const auto& [_, link] : children_) link->send(frame);
}

void ControlRelay::tick(bool may_beat) {
  if (!entered_ || ended_) return;
  for (auto& [_, exchange] : exchanges_) {
    if (exchange.aged) pass_on(exchange);
    exchange.aged = true;
  }
  if (may_beat && !beats_.empty()) {
    BeatsFrame all;
    for (auto& [rank, beat] : beats_) all.beats.emplace_back(rank, std::move(beat));
    beats_.clear();
    handlers_.up(FrameType::kBeats, all.encode());
  }
  const FrameBytes beat = make_frame(FrameType::kBeat, BeatFrame{}.encode());
  for (const auto& [_, link] : children_) {
    if (link->idle()) link->send(beat);
  }
}

void ControlRelay::fail(const WorldEnd& world_end) {
  handlers_.up(FrameType::kFail, world_end.encode());
}

void ControlRelay::end(const WorldEnd& world_end) {
  if (std::exchange(ended_, true)) return;
  exchanges_.clear();
  send_to_all(FrameType::kFail, world_end.encode());
}

void ControlRelay::leave() {
  if (!ended_) send_to_all(FrameType::kGoodbye, rank_body(rank_));
}

void ControlRelay::finish_sending() {
  for (const auto& [_, link] : children_) link->finish_sending();
}

bool ControlRelay::all_closed() const {
  return std::ranges::all_of(open_,
                             [this](int rank) { return !children_.at(through_.at(rank))->open(); });
}

bool ControlRelay::all_gone() const {
  return std::ranges::none_of(children_, [](const auto& entry) { return entry.second->open(); });
}

}  // namespace hsdp::comm
