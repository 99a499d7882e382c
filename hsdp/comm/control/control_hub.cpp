#include "hsdp/comm/control/control_hub.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

bool is_valid_group(const std::vector<int>& members, int size) {
  const bool ascending =
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  return !members.empty() && ascending && members.front() >= 0 && members.back() < size;
}

// Without a name, a job is named after its parent process, which differs between hosts.
bool same_job(const std::string& a, const std::string& b) {
  return a == b || a.starts_with("parent-") || b.starts_with("parent-");
}

// The number of the Slurm step in a job's name, or "". Ignores a Slurm job id before it, because
// parts of a heterogeneous step have different ones.
std::string_view slurm_step(std::string_view job) {
  const std::size_t mark = job.rfind(kSlurmStepMark);
  if (mark == std::string_view::npos) return {};
  std::string_view step = job.substr(mark + std::string_view(kSlurmStepMark).size());
  step = step.substr(0, step.find('@'));
  return step.substr(step.rfind('.') + 1);
}

}  // namespace

ControlHub::ControlHub(const OwnClock& clock, Options options, FrameHandler to_own)
    : clock_(clock),
      options_(std::move(options)),
      to_own_(std::move(to_own)),
      started_(clock.now()),
      peers_(static_cast<std::size_t>(options_.own.size)) {
  peers_[0].phase = Phase::kJoined;
  peers_[0].host = options_.own.host;
}

std::vector<int> ControlHub::missing() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].phase == Phase::kAwaited) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

bool ControlHub::all_gone() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return !peer.link || !peer.link->open(); });
}

bool ControlHub::all_closed() const {
  for (int rank = 1; rank < options_.own.size; ++rank) {
    const auto& link = peers_[static_cast<std::size_t>(highest_above(rank))].link;
    const bool is_closed = peers_[static_cast<std::size_t>(rank)].phase == Phase::kClosed;
    if (!is_closed && link && link->open()) return false;
  }
  return true;
}

// The last of the ranks through which this one speaks; itself, if it speaks for itself.
int ControlHub::highest_above(int rank) const {
  for (;;) {
    const int parent = peers_[static_cast<std::size_t>(rank)].parent;
    if (parent == 0) return rank;
    rank = parent;
  }
}

bool ControlHub::speaks_through(int rank, int other) const {
  while (rank > other) rank = peers_[static_cast<std::size_t>(rank)].parent;
  return rank == other;
}

void ControlHub::refuse(std::shared_ptr<FrameLink> link, const WorldEnd& problem) {
  constexpr std::size_t kMaxRefused = 64;
  const bool alone = problem.failure.ranks.empty();
  link->send(alone ? make_frame(FrameType::kRefuse, problem.failure.message)
                   : make_frame(FrameType::kFail, problem.encode()));
  link->finish_sending();
  refused_.push_back(std::move(link));
  if (refused_.size() > kMaxRefused) {
    refused_.front()->close();
    refused_.pop_front();
  }
  if (!alone) end(problem);
}

bool ControlHub::is_of_this_job(const JoinFrame& join) const {
  return same_job(join.job, options_.own.job) && join.restart_count == options_.own.restart_count;
}

// Why to refuse a rank. With ranks at fault it ends the world; without, only `join` is refused.
std::optional<WorldEnd> ControlHub::objection(const JoinFrame& join) const {
  const JoinFrame& own = options_.own;
  const std::string who = " on " + ranks_text({join.rank}, own.size);
  if (join.version != own.version) {
    return end_by_mismatch(join.rank,
                           Message{.where = "rendezvous: protocol version",
                                   .expected = std::to_string(own.version) + " on every rank",
                                   .got = std::to_string(join.version) + who,
                                   .remedy = "use one build of hsdp for all ranks"}
                               .text());
  }
  if (!is_of_this_job(join)) {
    // If two Slurm steps had one name, their programs would form one mesh.
    const std::string ports = "where two jobs or steps meet at one HSDP_PORT, give each its own";
    const std::string_view own_step = slurm_step(own.job);
    const std::string_view its_step = slurm_step(join.job);
    const bool steps = !own_step.empty() && !its_step.empty() && own_step != its_step;
    WorldEnd alone = end_by_mismatch(
        join.rank,
        Message{.where = "rendezvous",
                .expected = "job '" + own.job + "' restart " + std::to_string(own.restart_count) +
                            " on every rank",
                .got = "'" + join.job + "' restart " + std::to_string(join.restart_count) + who,
                .remedy = steps ? ports
                                : ports + "; where it is one job, set HSDP_JOB to one name on all "
                                          "of its ranks"}
            .text());
    alone.failure.ranks.clear();
    return alone;
  }
  if (join.size != own.size || join.rank < 1 || join.rank >= own.size) {
    return end_by_mismatch(
        join.rank,
        Message{.where = "rendezvous: world size",
                .expected = std::to_string(own.size) + " on every rank",
                .got = std::to_string(join.size) + " on rank " + std::to_string(join.rank),
                .remedy = "start all ranks with one launcher"}
            .text());
  }
  const Peer& peer = peers_[static_cast<std::size_t>(join.rank)];
  if (peer.phase != Phase::kAwaited && (welcomed_ || peer.process != join.process)) {
    WorldEnd alone = end_by_mismatch(
        join.rank, Message{.where = "rendezvous",
                           .expected = "one process as " + ranks_text({join.rank}, own.size),
                           .got = "a second one",
                           .remedy = "start each rank once, and other jobs with another "
                                     "HSDP_JOB"}
                       .text());
    alone.failure.ranks.clear();
    return alone;
  }
  return std::nullopt;
}

void ControlHub::join(std::shared_ptr<FrameLink> link, const JoinFrame& join) {
  if (const auto problem = objection(join)) {
    if (!same_job(join.job, options_.own.job)) other_job_ = join.job;
    return refuse(std::move(link), *problem);
  }
  const int rank = join.rank;
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.link) peer.link->close();  // from an earlier attempt of this process
  peer.phase = Phase::kJoined;
  peer.vanished.clear();
  peer.link = std::move(link);
  peer.host = join.host;
  peer.process = join.process;
  peer.last_heard = clock_.now();
  if (ended_) return send(rank, make_frame(FrameType::kFail, ended_->encode()));
  welcome_if_complete();
}

void ControlHub::welcome_if_complete() {
  if (welcomed_ || !missing().empty()) return;
  WelcomeFrame welcome;
  welcome.secret = options_.welcome_secret;
  for (const Peer& peer : peers_) welcome.hosts.push_back(peer.host);
  const std::string body = welcome.encode();
  const FrameBytes frame = make_frame(FrameType::kWelcome, body);
  welcomed_ = true;
  for (int rank = 1; rank < options_.own.size; ++rank) send(rank, frame);
  to_own_(FrameType::kWelcome, body);
}

void ControlHub::send(int rank, const FrameBytes& frame) {
  if (rank == 0) {
    to_own_(type_of(*frame), std::string_view{*frame}.substr(kFrameHeaderBytes));
    return;
  }
  const auto& link = peers_[static_cast<std::size_t>(rank)].link;
  if (link) link->send(frame);
}

void ControlHub::heard(int rank) {
  peers_[static_cast<std::size_t>(rank)].last_heard = clock_.now();
}

void ControlHub::handle(int rank, FrameType type, std::string_view body) {
  heard(rank);
  switch (type) {
    case FrameType::kGroup:
      return add_group(rank, body);
    case FrameType::kPost:
      return post(rank, body);
    case FrameType::kMerged: {
      const auto frame = MergedFrame::decode(body);
      if (frame) return take(rank, *frame);
      return end(end_by_malformed("exchange", rank));
    }
    case FrameType::kTell:
      return pass_on(rank, body);
    case FrameType::kRelayed:
      return handle_relayed(rank, body);
    case FrameType::kMoved:
      return move(rank, body);
    case FrameType::kBeats: {
      auto all = BeatsFrame::decode(body);
      if (!all) return;
      for (auto& [of, beat] : all->beats) {
        if (is_rank(of)) take_beat(of, std::move(beat));
      }
      return;
    }
    case FrameType::kBeat:
      if (auto beat = BeatFrame::decode(body)) take_beat(rank, std::move(*beat));
      return;
    case FrameType::kFail:
      if (auto world_end = WorldEnd::decode(body)) end(std::move(*world_end));
      return;
    case FrameType::kProcessEnd: {
      const auto ended = rank_in(body);
      if (ended && is_rank(*ended)) process_ended(*ended);
      return;
    }
    case FrameType::kGoodbye:
      return close(rank);
    default:
      return end(
          end_by_mismatch(rank, "control: unexpected message from rank " + std::to_string(rank)));
  }
}

void ControlHub::take_beat(int rank, BeatFrame beat) {
  heard(rank);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.phase == Phase::kClosed) return;  // a relay still had it
  ++peer.beat_count;
  peer.waits = std::move(beat.waits);
}

// Handles a frame that a relay passed on unchanged.
void ControlHub::handle_relayed(int from, std::string_view body) {
  const auto relayed = RelayedFrame::decode(body);
  const bool may = relayed && is_rank(relayed->rank) &&
                   (relayed->type == FrameType::kTell || relayed->type == FrameType::kGoodbye);
  if (!may) return end(end_by_malformed("message", from));
  handle(relayed->rank, relayed->type, relayed->body);
}

// The last message on the rank's own link: it has read everything that was sent there.
void ControlHub::move(int rank, std::string_view body) {
  if (ended_) return;  // the rank hears of it on that link
  const auto parent = rank_in(body);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!parent || *parent <= 0 || *parent >= rank || !peer.link) {
    return end(end_by_malformed("message", rank));
  }
  peer.parent = *parent;
  if (peer.link->idle()) {
    peer.link->close();
  } else {
    peer.link->finish_sending();  // it lives until the rank closes it
  }
  peer.link.reset();
}

void ControlHub::close(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.phase = Phase::kClosed;
  peer.waits.clear();
  const int highest = highest_above(rank);
  bool all_closed = true;
  for (int other = highest; other < options_.own.size; ++other) {
    const bool is_closed = peers_[static_cast<std::size_t>(other)].phase == Phase::kClosed;
    all_closed = all_closed && (is_closed || !speaks_through(other, highest));
  }
  const auto& link = peers_[static_cast<std::size_t>(highest)].link;
  if (all_closed && link) link->finish_sending();
  std::erase_if(exchanges_, [&](const auto& entry) {
    const auto& [name, exchange] = entry;
    if (!exchange.while_open || !std::ranges::binary_search(groups_.at(exchange.group), rank)) {
      return false;
    }
    answer(exchange, name, std::nullopt);
    exchange_names_.erase(exchange.hash);
    return true;
  });
}

// The rank left: those that spoke through it can no longer be heard.
void ControlHub::close_below(int rank) {
  for (int other = rank + 1; other < options_.own.size; ++other) {
    const bool is_open = peers_[static_cast<std::size_t>(other)].phase != Phase::kClosed;
    if (!is_open || !speaks_through(other, rank)) continue;
    peers_[static_cast<std::size_t>(other)].closed_by = rank;
    close(other);
  }
}

void ControlHub::add_group(int rank, std::string_view body) {
  if (ended_) return;
  auto frame = GroupFrame::decode(body);
  if (!frame || !is_valid_group(frame->members, options_.own.size)) {
    return end(end_by_malformed("group", rank));
  }
  const std::uint64_t id = group_id(frame->members);
  const auto [known, is_new] = groups_.try_emplace(id, frame->members);
  if (known->second != frame->members) {
    end(end_by_mismatch(rank, "control: two groups of ranks have one id; use other ones"));
  }
}

void ControlHub::post(int rank, std::string_view body) {
  auto post = PostFrame::decode(body);
  if (!post) return end(end_by_malformed("exchange", rank));
  MergedFrame merged{post->group, std::move(post->key), post->while_open, {rank}, {}};
  merged.agreement.add(rank, post->saying);
  take(rank, merged);
}

void ControlHub::take(int from, const MergedFrame& frame) {
  if (ended_) return;
  const auto group = groups_.find(frame.group);
  if (group == groups_.end() || frame.ranks.empty() ||
      !std::ranges::includes(group->second, frame.ranks)) {
    return end(end_by_malformed("exchange", from));
  }
  const std::vector<int>& members = group->second;
  const std::string name = exchange_name(frame.key, frame.group);
  auto [place, is_new] = exchanges_.try_emplace(name);
  Exchange& exchange = place->second;
  if (is_new) {
    exchange.hash = exchange_hash(name);
    exchange_names_[exchange.hash] = name;
    exchange.group = frame.group;
    exchange.came.resize(members.size());
    exchange.missing_count = members.size();
    exchange.while_open = frame.while_open;
  }
  for (const int rank : frame.ranks) {
    const auto member =
        static_cast<std::size_t>(std::ranges::lower_bound(members, rank) - members.begin());
    if (exchange.came[member]) {
      return end(end_by_second_use(frame.key, rank));
    }
    exchange.came[member] = true;
    --exchange.missing_count;
  }
  exchange.from.insert(from);
  exchange.agreement.merge(frame.agreement);
  const bool is_cut = exchange.while_open && std::ranges::any_of(members, [this](int other) {
                        return peers_[static_cast<std::size_t>(other)].phase == Phase::kClosed;
                      });
  if (exchange.missing_count > 0 && !is_cut) return;
  Exchange over = std::move(exchange);
  exchange_names_.erase(over.hash);
  exchanges_.erase(place);
  if (is_cut) return answer(over, name, std::nullopt);
  over.agreement.close();
  Agreement agreement = std::move(over.agreement);
  answer(over, name, std::move(agreement));
}

// Answers the ranks that have said something, and this process last: once its caller continues, all
// other answers are on their way.
void ControlHub::answer(const Exchange& exchange, std::string name,
                        std::optional<Agreement> agreement) {
  const AnswerFrame frame{std::move(name), std::move(agreement)};
  const FrameBytes bytes = make_frame(FrameType::kAnswer, frame.encode());
  for (const int rank : exchange.from) send(rank, bytes);
}

void ControlHub::link_broke(int rank, const std::string& reason) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const std::string why = "its connection ended: " + reason;
  if (welcomed_ || ended_) return lost(rank, why);
  peer.last_heard = clock_.now();
  peer.phase = Phase::kAwaited;
  peer.vanished = why;
}

void ControlHub::pass_on(int rank, std::string_view body) {
  if (ended_) return;
  auto frame = TellFrame::decode(body);
  if (!frame || !is_rank(frame->peer)) return end(end_by_malformed("message", rank));
  const int receiver = std::exchange(frame->peer, rank);
  const int highest = highest_above(receiver);
  if (highest == receiver) return send(receiver, make_frame(FrameType::kTell, frame->encode()));
  const RelayedFrame relayed{receiver, FrameType::kTell, frame->encode()};
  send(highest, make_frame(FrameType::kRelayed, relayed.encode()));
}

void ControlHub::lost(int rank, const std::string& reason) {
  if (ended_ || left_) return;
  if (peers_[static_cast<std::size_t>(rank)].phase == Phase::kClosed) return close_below(rank);
  WorldEnd world_end = end_by_loss(rank, options_.own.size, reason);
  std::chrono::milliseconds oldest{-1};
  for (const Peer& peer : peers_) {
    if (peer.waits.empty() || peer.waits.front().age <= oldest) continue;
    oldest = peer.waits.front().age;
    world_end.operation = peer.waits.front().operation;
    world_end.bucket = peer.waits.front().bucket;
  }
  end(std::move(world_end));
}

void ControlHub::end(WorldEnd world_end) {
  if (ended_ || left_) return;
  ended_ = std::move(world_end);
  exchanges_.clear();
  exchange_names_.clear();
  const FrameBytes frame = make_frame(FrameType::kFail, ended_->encode());
  // This process last: it may do a lot when it hears of the end.
  for (int rank = options_.own.size - 1; rank >= 0; --rank) send(rank, frame);
}

void ControlHub::leave() {
  if (ended_ || left_) return;
  left_ = true;
  const FrameBytes goodbye = make_frame(FrameType::kGoodbye, rank_body(0));
  for (int rank = 1; rank < options_.own.size; ++rank) send(rank, goodbye);
}

void ControlHub::finish_sending() {
  for (const Peer& peer : peers_) {
    if (peer.link) peer.link->finish_sending();
  }
}

}  // namespace hsdp::comm
