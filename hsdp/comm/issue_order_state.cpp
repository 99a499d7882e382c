#include "hsdp/comm/issue_order_state.h"

#include <algorithm>
#include <span>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/engine.h"
#include "hsdp/device/run_front.h"

namespace hsdp {
namespace {

using LaneCount = comm::RecordedTurns::LaneCount;

std::string encode(std::uint32_t generation, const std::vector<LaneCount>& counts) {
  comm::WireWriter out;
  out.u32(generation);
  for (const LaneCount& entry : counts) {
    out.i32(entry.lane);
    out.u64(static_cast<std::uint64_t>(entry.count));
  }
  return out.take();
}

// Empty for another generation.
std::vector<LaneCount> decode(std::uint32_t generation, std::string_view bytes) {
  constexpr std::size_t kEntryBytes = 12;
  comm::WireReader in(bytes);
  if (in.u32() != generation) return {};
  std::vector<LaneCount> counts(bytes.size() / kEntryBytes);
  for (LaneCount& entry : counts) {
    entry.lane = in.i32();
    entry.count = static_cast<std::int64_t>(in.u64());
  }
  return counts;
}

}  // namespace

// Decides which items are ordered. Stops behind an item that may change the answers until that has
// run, so that all ranks count the same items.
void IssueOrder::State::Queue::sort() {
  while (!holds_back && sorted < items.size()) {
    Item& item = items[sorted++];
    item.ordered = item.skipped && !item.skipped();
    if (!item.ordered) continue;
    const bool is_bucket = item.place != kAfterBuckets;
    item.opens = is_bucket && opens_next;
    opens_next = !is_bucket;
    places.push_back({item.place, item.ends_step, item.phase});
    holds_back = item.may_skip_later;
  }
}

void IssueOrder::State::issue_front(Lock& lock, Queue& queue) {
  const Item& item = queue.items.front();
  --queue.sorted;
  if (item.ordered) {
    queue.places.pop_front();
    ++queue.issued;
  }
  if (item.skipped && item.place == kAfterBuckets) queue.unissued.pop_front();
  const bool held_back = item.ordered && item.may_skip_later;
  run_front(lock, queue);
  if (held_back) queue.holds_back = false;
  changed.notify_all();
}

bool IssueOrder::State::run_one_local(Lock& lock) {
  for (const auto& [_, queue] : queues) {
    if (!queue->has_local()) continue;
    const std::shared_ptr<Queue> kept = queue;  // the lane may be gone afterwards
    issue_front(lock, *kept);
    return true;
  }
  return false;
}

// Whether this rank has not issued all that the furthest rank had when a second lane came.
bool IssueOrder::State::catches_up() const {
  return std::ranges::any_of(
      queues, [](const auto& entry) { return entry.second->issued < entry.second->unasked; });
}

// Null if the next task of all ranks is not known, or not here yet.
std::shared_ptr<IssueOrder::State::Queue> IssueOrder::State::next_in_order() const {
  if (paused && !failed) return nullptr;
  for (const auto& [_, queue] : queues) {
    const bool unasked = failed || queue->issued < queue->unasked;
    if (unasked && queue->has_ordered()) return queue;
  }
  if (failed || catches_up()) return nullptr;
  const std::optional<int> lane = turns().next();
  if (!lane || (owes && turns().is_recorded())) return nullptr;
  const auto found = queues.find(*lane);
  if (found == queues.end() || !found->second->has_ordered()) return nullptr;  // of a record alone
  const bool waits = turns().is_recorded() && (is_early(*found->second) || is_meeting());
  return waits ? nullptr : found->second;
}

// Whether tasks that came before are not issued yet; another rank may need them before its next
// task.
bool IssueOrder::State::is_early(const Queue& queue) const {
  const std::int64_t its_phase = queue.items.front().phase;
  return std::ranges::any_of(queues, [its_phase](const auto& entry) {
    const Queue& other = *entry.second;
    return !other.unissued.empty() && other.unissued.front() < its_phase;
  });
}

// Whether the next turn is that of a bucket before which a rank may need what no record has: no
// rank issues it before all have it.
bool IssueOrder::State::is_meeting() const {
  if (owes || !turns().is_recorded() || !turns().next() || record->has_met()) return false;
  const auto found = queues.find(*turns().next());
  if (found == queues.end() || !found->second->meets || !found->second->has_ordered()) return false;
  return found->second->items.front().opens && !is_early(*found->second);
}

void IssueOrder::State::run_turn(Lock& lock, Queue& queue) {
  if (!several) {
    ++issued_alone;
  } else if (!failed && queue.issued >= queue.unasked) {
    record->take();
  }
  issue_front(lock, queue);
}

// The counts that the first rank does not know yet.
std::vector<LaneCount> IssueOrder::State::take_news() {
  std::vector<LaneCount> news;
  for (const auto& [number, queue] : queues) {
    if (queue->told == queue->ready()) continue;
    queue->told = queue->ready();
    news.push_back({number, queue->told});
  }
  return news;
}

// On the first rank: the turns of all tasks that are ready on every rank.
std::vector<LaneCount> IssueOrder::State::choose_turns() {
  if (owes) record->restart();
  std::vector<LaneCount> choice;
  for (;;) {
    std::shared_ptr<Queue> best;
    const auto key_of = [](const Queue& queue) {
      const Queue::Place& task = queue.at(queue.chosen);
      return std::pair(task.phase, task.place);
    };
    for (const auto& [_, queue] : queues) {
      const std::int64_t next = queue->chosen;
      const bool everywhere =
          std::ranges::all_of(queue->heard, [next](std::int64_t count) { return next < count; });
      if (next >= queue->ready() || !everywhere) continue;
      if (best == nullptr || key_of(*queue) < key_of(*best)) best = queue;
    }
    if (best == nullptr) return choice;
    const bool ends_step = best->at(best->chosen).ends_step;
    ++best->chosen;
    if (choice.empty() || choice.back().lane != best->number) choice.push_back({best->number, 0});
    ++choice.back().count;
    const std::int64_t length = record->choose(best->number, ends_step);
    if (length == 0 || owes) continue;
    choice.push_back({RecordedTurns::kFollow, length});
    return choice;
  }
}

// Called when nothing is left to issue, so that one message tells of all tasks that came meanwhile.
bool IssueOrder::State::speak(Lock& lock) {
  if (!several || paused || failed || catches_up()) return false;
  if (turns().follows()) {
    if (!is_meeting() || !record->meet()) return false;
    flush(lock);
    return true;
  }
  const std::vector<LaneCount> counts = rank == 0 ? choose_turns() : take_news();
  if (counts.empty()) return false;
  for (const LaneCount& entry : counts) {
    if (rank == 0) record->tell(entry);
  }
  say(counts);
  flush(lock);
  return true;
}

// The first rank queues a message to every other rank; others queue one to the first.
void IssueOrder::State::say(const std::vector<LaneCount>& entries) {
  const std::span<const int> all(members);
  for (const int peer : rank == 0 ? all.subspan(1) : all.first(1)) {
    outbox.push_back({peer, generation, entries});
  }
}

// Sends messages in the order in which they were decided, on any thread.
void IssueOrder::State::flush(Lock& lock) {
  if (sending) return;
  sending = true;
  while (!outbox.empty()) {
    const Message message = std::move(outbox.front());
    outbox.pop_front();
    lock.unlock();
    try {
      if (const auto kept = engine.lock()) {
        kept->control().tell(message.peer, topic(), encode(message.generation, message.entries));
      }
    } catch (const std::exception&) {  // in a forked child, whose tasks fail themselves
    }
    lock.lock();
  }
  sending = false;
  changed.notify_all();
}

// Runs on another thread, as the issuing one may wait in a task.
void IssueOrder::State::hear(int from, std::string_view message) {
  Lock lock(mutex);
  for (const LaneCount& entry : decode(generation, message)) {
    if (record->hear(from, entry)) continue;
    if (rank != 0) {
      count_turns(entry.lane, entry.count);
      record->tell(entry);
    } else if (const auto found = queues.find(entry.lane); found != queues.end()) {
      const auto member = std::ranges::find(members, from) - members.begin();
      found->second->heard.at(static_cast<std::size_t>(member)) = entry.count;
    }
  }
  // The engine's destructor waits for this thread, so another one must release it.
  auto kept = outbox.empty() ? nullptr : engine.lock();
  flush(lock);
  changed.notify_all();
  lock.unlock();
  if (kept) std::thread([kept = std::move(kept)] {}).detach();
}

// Whether a recorded turn must not be taken, or has no task here while another lane has one.
bool IssueOrder::State::is_stalled() const {
  if (failed || record->asked_to_stop() || !turns().is_recorded() || !turns().next()) return false;
  if (is_meeting()) return false;  // Control knows of that wait
  return owes ||
         std::ranges::any_of(queues, [](const auto& entry) { return entry.second->has_ordered(); });
}

// Whether the tasks here already show that the record is wrong.
bool IssueOrder::State::breaks_record() const {
  const auto found = queues.find(turns().next().value());
  return owes || found == queues.end() || found->second->has_ordered();
}

// Waits while nothing can be issued. Returns whether the record should end for that.
bool IssueOrder::State::wait_for_work(Lock& lock) {
  using Clock = std::chrono::steady_clock;
  if (!is_stalled()) {
    stall.reset();
    changed.wait(lock);
    return false;
  }
  if (!stall || stall->taken != turns().taken()) stall = {Clock::now(), turns().taken()};
  const Clock::time_point end = stall->since + patience.load();
  if (breaks_record() || Clock::now() >= end) return true;
  changed.wait_until(lock, end);
  return false;
}

int IssueOrder::State::missing_peer(const Queue& queue) const {
  if (rank != 0) return members.front();
  const auto missing =
      std::ranges::find_if(queue.heard, [&](std::int64_t count) { return count <= queue.chosen; });
  return members[static_cast<std::size_t>(missing - queue.heard.begin())];
}

// What this rank waits for: the oldest lane's task that is ready here and has no turn yet.
std::optional<IssueOrder::State::Wait> IssueOrder::State::awaited() const {
  if (!several || paused || failed || catches_up()) return std::nullopt;
  if (turns().follows()) {
    const std::optional<int> peer = record->awaited();
    if (!peer) return std::nullopt;
    const int place =
        is_meeting() ? queues.at(*turns().next())->items.front().place : kAfterBuckets;
    return Wait{-1, turns().taken(), place, *peer};
  }
  if (turns().next()) return std::nullopt;  // this rank's task is missing, which others report
  for (const auto& [number, queue] : queues) {
    const std::int64_t next = queue->chosen;
    if (next >= 0 && next < queue->ready()) {
      return Wait{number, next, queue->at(next).place, missing_peer(*queue)};
    }
  }
  return std::nullopt;
}

bool IssueOrder::State::change_wait(Lock& lock, const std::optional<Wait>& wanted) {
  if (waiting == wanted) return false;
  lock.unlock();
  if (const auto kept = engine.lock()) {
    if (waiting) kept->control().end_wait(wait_slot);
    if (wanted) {
      wait_slot = kept->control().begin_wait(
          {.operation = "issue order",
           .bucket = wanted->place == kAfterBuckets ? kNoBucket : wanted->place,
           .peer = wanted->peer});
    }
  }
  waiting = wanted;
  lock.lock();
  return true;
}

bool IssueOrder::State::is_open() const {
  return std::ranges::any_of(queues, [](const auto& entry) { return entry.second->open > 0; });
}

bool IssueOrder::State::is_idle() const {
  return std::ranges::all_of(queues, [](const auto& entry) { return entry.second->idle(); });
}

void IssueOrder::State::let_tasks_go_first() {
  Lock lock(mutex);
  const auto may_go = [this] { return is_idle() || is_open() || failed; };
  while (!changed.wait_for(lock, time_to_look(), may_go)) {
    std::function<void()> give;
    for (const auto& [_, queue] : queues) {
      if (!give) give = needed_first(*queue);
    }
    flush(lock);
    if (!give || may_go()) continue;
    lock.unlock();
    give();
    lock.lock();
  }
}

// Returns what the other ranks need to know: whether this rank has other lanes, and how far it is.
comm::Saying IssueOrder::State::begin_adding(const std::shared_ptr<Queue>& queue) {
  record->begin_adding(several);
  if (!several) ++generation;
  comm::Saying mine;
  mine.any = {queues.empty() ? '\0' : '\1'};
  mine.most = {several ? turns().taken() : issued_alone};
  queue->heard.assign(members.size(), 0);
  queue->heard.front() = kAll;    // the first rank knows its own tasks
  queues[queue->number] = queue;  // other ranks may tell of it from here on
  paused = !several;
  return mine;
}

// `all`: what the ranks said, or none after a failure.
void IssueOrder::State::end_adding(Queue& queue, const std::optional<comm::Agreement>& all) {
  paused = false;
  const bool ends_record = all && rank == 0 && several;
  record->end_adding(ends_record ? std::optional(all->most.front()) : std::nullopt);
  if (!all) {
    failed = true;  // the ranks no longer know how far the others are
    queues.erase(queue.number);
  } else if (all->any.front() == '\0') {  // no other lanes, on any rank
    several = false;
    issued_alone = 0;
    queue.unasked = kAll;
  } else if (!several) {
    several = true;
    const std::int64_t furthest = all->most.front();
    for (const auto& [_, older] : queues) {
      if (older->unasked == kAll) older->unasked = older->chosen = furthest;
    }
  }
}

void IssueOrder::State::remove(int lane) {
  queues.erase(lane);
  if (!turns().follows()) {
    record->restart();
  } else if (queues.empty()) {
    record->leave();
  }
}

void IssueOrder::State::count_turns(int lane, std::int64_t count) {
  const auto found = queues.find(lane);
  if (found != queues.end()) found->second->chosen += count;
}

void IssueOrder::State::come(Queue& queue, Item item) {
  if (item.phase < 0) item.phase = phase;
  if (item.skipped && item.place == kAfterBuckets) queue.unissued.push_back(phase++);
  queue.items.push_back(std::move(item));
}

void IssueOrder::State::give_here(Queue& queue) {
  constexpr std::size_t kMost = 4;
  const std::thread::id here = std::this_thread::get_id();
  if (std::ranges::find(queue.givers, here) != queue.givers.end()) return;
  queue.givers.push_back(here);
  if (queue.givers.size() > kMost) queue.givers.pop_front();
}

// For a thread that waits for a task of `mine`. A turn that was told has its task here, unless
// another rank took it by a record that has ended since.
std::function<void()> IssueOrder::State::needed_first(const Queue& mine) {
  if (failed || paused || !several || !mine.has_ordered() || catches_up()) return {};
  const bool works = std::ranges::any_of(
      queues, [](const auto& entry) { return entry.second->busy || entry.second->has_local(); });
  const std::optional<int> lane = turns().next();
  if (works || !lane) return {};
  const auto found = queues.find(*lane);
  if (found != queues.end() && !found->second->idle()) return {};
  if (turns().is_recorded()) {
    if (!record->asked_to_stop()) record->ask_to_stop();
    return {};
  }
  if (found == queues.end()) return {};
  const Queue& needed = *found->second;
  const auto giver = std::ranges::find(needed.givers, std::this_thread::get_id());
  return giver == needed.givers.end() ? std::function<void()>() : needed.give;
}

void IssueOrder::State::work() {
  is_issuing = true;
  Lock lock(mutex);
  for (;;) {
    for (const auto& [_, queue] : queues) queue->sort();
    if (run_one_local(lock)) continue;
    if (const auto next = next_in_order()) {
      // Its task may be the last one that needs the world: nothing is held of it then.
      if (!change_wait(lock, std::nullopt)) run_turn(lock, *next);
      continue;
    }
    if (speak(lock) || change_wait(lock, awaited())) continue;
    if (closing) return;
    // A record that was told before has ended here, too.
    if (late == 0 && is_idle() && !turns().follows()) owes = false;
    if (!wait_for_work(lock)) continue;
    record->ask_to_stop();
    flush(lock);
  }
}

}  // namespace hsdp
