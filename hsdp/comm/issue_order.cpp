#include "hsdp/comm/issue_order.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/recorded_turns.h"
#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/device/host_event.h"

namespace hsdp {
namespace {

thread_local bool is_issuing = false;  // the thread of an IssueOrder

using comm::RecordedTurns;
using LaneCount = RecordedTurns::LaneCount;

constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

struct Item {
  std::function<void()> task;
  std::function<bool()> skipped{};  // empty: a local task
  int place = 0;
  bool may_skip_later = false;
  bool ends_step = false;
  std::int64_t phase = -1;             // how many tasks but buckets had come to all lanes before it
  std::shared_ptr<HostEvent> event{};  // instead of a task
  bool ordered = false;                // once it is sorted
  bool opens = false;                  // the first bucket of a microbatch
};

// Long, as a backward pass may be slow. A thread that waits is what shows that a record is wrong.
std::atomic<std::chrono::microseconds> patience{std::chrono::seconds(1)};

std::string encode(std::uint32_t generation, const std::vector<LaneCount>& counts) {
  comm::WireWriter out;
  out.u32(generation);
  for (const LaneCount& entry : counts) {
    out.i32(entry.lane);
    out.u64(static_cast<std::uint64_t>(entry.count));
  }
  return out.take();
}

// Nothing of another generation.
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

struct IssueOrder::State {
  struct Queue {
    int number = 0;
    std::deque<Item> items;
    bool meets = false;       // first buckets
    bool opens_next = true;   // a bucket that comes is the first one
    std::size_t sorted = 0;   // items at the front, known to be ordered or local
    bool holds_back = false;  // a sorted one may yet change what the next ones are
    struct Place {
      int place = 0;
      bool ends_step = false;
      std::int64_t phase = 0;
    };
    std::deque<Place> places;  // of the ordered ones in the queue
    std::int64_t issued = 0;   // ordered ones that left it
    std::int64_t told = 0;     // how many the first rank knows to be ready here
    std::int64_t chosen = 0;   // how many have got their turn
    std::int64_t unasked = 0;  // how many need none, as there was one lane only: kAll, there is
    std::vector<std::int64_t> heard;     // first rank: how many are ready, by rank
    bool busy = false;                   // an item is out of the queue but not done
    int open = 0;                        // tokens of open() that live
    std::deque<std::int64_t> unissued;   // tasks but buckets, as numbers over all lanes
    std::deque<std::thread::id> givers;  // the last
    std::function<void()> give;          // on_need()
    std::exception_ptr error;

    void sort();
    [[nodiscard]] bool idle() const { return items.empty() && !busy; }
    [[nodiscard]] bool has_local() const { return sorted > 0 && !items.front().ordered; }
    [[nodiscard]] bool has_ordered() const { return sorted > 0 && items.front().ordered; }
    [[nodiscard]] std::int64_t ready() const {
      return issued + static_cast<std::int64_t>(places.size());
    }
    [[nodiscard]] const Place& at(std::int64_t number_in_lane) const {
      return places[static_cast<std::size_t>(number_in_lane - issued)];
    }
  };
  // What Control is told that this thread waits for.
  struct Wait {
    int lane = 0;
    std::int64_t number_in_lane = 0;
    int place = 0;
    int peer = 0;  // world rank
    friend bool operator==(const Wait&, const Wait&) = default;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::weak_ptr<Communicator::Engine> engine;
  std::string group_id;
  std::vector<int> members;  // world ranks, of which the first chooses
  int rank = 0;              // among them

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::shared_ptr<Queue>> queues;
  int next_number = 0;
  bool several = false;           // lanes: turns are agreed
  std::int64_t issued_alone = 0;  // ordered items, while there is one lane
  std::optional<RecordedTurns> record;
  std::atomic<std::int64_t> phase = 0;  // of what comes next
  int late = 0;                         // tokens of come_late() that live
  bool owes = false;                    // what came late is not issued
  bool paused = false;                  // until the ranks know from where on they agree
  struct Stall {
    std::chrono::steady_clock::time_point since;
    std::int64_t taken = 0;
  };
  std::optional<Stall> stall;
  struct Message {
    int peer = 0;
    std::uint32_t generation = 0;
    std::vector<LaneCount> entries;
  };
  std::deque<Message> outbox;
  bool sending = false;
  std::uint32_t generation = 0;  // of `record`; messages of an earlier one are not read
  bool failed = false;
  bool closing = false;
  std::optional<Wait> waiting;  // only the thread's
  int wait_slot = 0;

  void work();
  void let_tasks_go_first();
  [[nodiscard]] bool is_open() const;
  [[nodiscard]] bool is_idle() const;
  void come(Queue& queue, Item item);
  void give_here(Queue& queue);
  [[nodiscard]] const comm::Turns& turns() const { return record->turns(); }
  [[nodiscard]] bool is_early(const Queue& queue) const;
  [[nodiscard]] bool is_meeting() const;
  [[nodiscard]] std::function<void()> needed_first(const Queue& mine);
  bool run_one_local(Lock& lock);
  void run_front(Lock& lock, Queue& queue);
  void run_turn(Lock& lock, Queue& queue);
  [[nodiscard]] std::shared_ptr<Queue> next_in_order() const;
  [[nodiscard]] bool catches_up() const;
  [[nodiscard]] std::vector<LaneCount> take_news();
  [[nodiscard]] std::vector<LaneCount> choose_turns();
  bool speak(Lock& lock);
  void say(const std::vector<LaneCount>& entries);
  void flush(Lock& lock);
  [[nodiscard]] bool is_stalled() const;
  [[nodiscard]] bool breaks_record() const;
  bool wait_for_work(Lock& lock);
  void hear(int from, std::string_view message);
  [[nodiscard]] int missing_peer(const Queue& queue) const;
  [[nodiscard]] std::optional<Wait> awaited() const;
  bool change_wait(Lock& lock, const std::optional<Wait>& wanted);

  [[nodiscard]] std::string topic() const { return group_id + "/issue"; }
};

// Decides which items are for all ranks. Nothing behind one that may change the answer is looked at
// before that one has run: so all ranks count the same items.
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

void IssueOrder::State::run_front(Lock& lock, Queue& queue) {
  Item item = std::move(queue.items.front());
  queue.items.pop_front();
  --queue.sorted;
  if (item.ordered) {
    queue.places.pop_front();
    ++queue.issued;
  }
  if (item.skipped && item.place == kAfterBuckets) queue.unissued.pop_front();
  const bool held_back = item.ordered && item.may_skip_later;
  queue.busy = true;
  std::exception_ptr error = queue.error;
  lock.unlock();
  if (item.event) {
    item.event->finish(error);
  } else if (!error) {
    try {
      item.task();
    } catch (...) {
      error = std::current_exception();
    }
  }
  item = {};  // what the task holds dies before the next task, and outside the lock
  lock.lock();
  if (!queue.error) queue.error = std::move(error);
  if (held_back) queue.holds_back = false;
  queue.busy = false;
  changed.notify_all();
}

bool IssueOrder::State::run_one_local(Lock& lock) {
  for (const auto& [_, queue] : queues) {
    if (!queue->has_local()) continue;
    const std::shared_ptr<Queue> kept = queue;  // the lane may be gone when it comes back
    run_front(lock, *kept);
    return true;
  }
  return false;
}

// This rank has not issued all that the furthest one had when a second lane came.
bool IssueOrder::State::catches_up() const {
  return std::ranges::any_of(
      queues, [](const auto& entry) { return entry.second->issued < entry.second->unasked; });
}

// Empty: what comes next on all ranks is not known, or not there yet.
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

// Another rank may not come to its next task before it has issued those that had come before.
bool IssueOrder::State::is_early(const Queue& queue) const {
  const std::int64_t its_phase = queue.items.front().phase;
  return std::ranges::any_of(queues, [its_phase](const auto& entry) {
    const Queue& other = *entry.second;
    return !other.unissued.empty() && other.unissued.front() < its_phase;
  });
}

// The next turn is that of a bucket before which a rank may need what no record has. All meet
// there: none issues it before every rank has it.
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
  run_front(lock, queue);
}

// What the first rank does not know yet.
std::vector<LaneCount> IssueOrder::State::take_news() {
  std::vector<LaneCount> news;
  for (const auto& [number, queue] : queues) {
    if (queue->told == queue->ready()) continue;
    queue->told = queue->ready();
    news.push_back({number, queue->told});
  }
  return news;
}

// All that is ready on every rank, by the first one.
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

// Only when nothing is left to be issued: so one message speaks of all that has come meanwhile.
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

// To all others, or to the first rank.
void IssueOrder::State::say(const std::vector<LaneCount>& entries) {
  const std::span<const int> all(members);
  for (const int peer : rank == 0 ? all.subspan(1) : all.first(1)) {
    outbox.push_back({peer, generation, entries});
  }
}

// In the order in which they were decided, whichever thread sends them.
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
    } catch (const std::exception&) {  // a forked child's: its tasks find out themselves
    }
    lock.lock();
  }
  sending = false;
  changed.notify_all();
}

// On another thread, as the one that issues may be waiting in a task.
void IssueOrder::State::hear(int from, std::string_view message) {
  Lock lock(mutex);
  for (const LaneCount& entry : decode(generation, message)) {
    if (record->hear(from, entry)) continue;
    const auto found = queues.find(entry.lane);
    if (rank != 0) {
      if (found != queues.end()) found->second->chosen += entry.count;
      record->tell(entry);
    } else if (found != queues.end()) {
      const auto member = std::ranges::find(members, from) - members.begin();
      found->second->heard.at(static_cast<std::size_t>(member)) = entry.count;
    }
  }
  // Whoever lets go of the engine last waits for the thread that hears: not this one.
  auto kept = outbox.empty() ? nullptr : engine.lock();
  flush(lock);
  changed.notify_all();
  lock.unlock();
  if (kept) std::thread([kept = std::move(kept)] {}).detach();
}

// A recorded turn has no task here and another lane has one, or it must not be taken.
bool IssueOrder::State::is_stalled() const {
  if (failed || record->asked_to_stop() || !turns().is_recorded() || !turns().next()) return false;
  if (is_meeting()) return false;  // Control knows of that wait
  return owes ||
         std::ranges::any_of(queues, [](const auto& entry) { return entry.second->has_ordered(); });
}

// What is here already shows that the record does not hold.
bool IssueOrder::State::breaks_record() const {
  const auto found = queues.find(turns().next().value());
  return owes || found == queues.end() || found->second->has_ordered();
}

// Nothing can be issued. Whether a record is to end for that.
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

// The oldest lane's task that is ready here and has no turn yet.
std::optional<IssueOrder::State::Wait> IssueOrder::State::awaited() const {
  if (!several || paused || failed || catches_up()) return std::nullopt;
  if (turns().follows()) {
    const std::optional<int> peer = record->awaited();
    if (!peer) return std::nullopt;
    const int place =
        is_meeting() ? queues.at(*turns().next())->items.front().place : kAfterBuckets;
    return Wait{-1, turns().taken(), place, *peer};
  }
  if (turns().next()) return std::nullopt;  // this rank's task is missing: others say so
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

// For a thread that waits for a task that `mine` has. A turn that is told has its task here, unless
// it is one that another rank took by a record that has ended since.
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
    // A record that was told of before has ended here, too.
    if (late == 0 && is_idle() && !turns().follows()) owes = false;
    if (!wait_for_work(lock)) continue;
    record->ask_to_stop();
    flush(lock);
  }
}

// The local tasks of a lane, as a stream.
class IssueOrder::IssuerQueue : public Stream::Queue {
 public:
  IssuerQueue(std::shared_ptr<State> state, std::shared_ptr<State::Queue> queue)
      : state_(std::move(state)), queue_(std::move(queue)) {}

  void run(std::function<void()> task) override { push({.task = std::move(task)}); }
  Event record() override { return Event(push_event()); }
  void wait(const Event& event) override {
    run([event] { event.wait(); });
  }
  void synchronize() override {
    const auto event = push_event();
    if (event == nullptr) return;
    wait([&event](std::chrono::microseconds time) { return event->wait_for(time); });
    event->wait();  // throws what went wrong
  }
  [[nodiscard]] Device device() const override { return {}; }

  void wait(const Issuer::WaitFor& wait_for) {
    while (!wait_for(time_to_look())) {
      const std::function<void()> give = needed_first();
      if (give && !wait_for({})) give();
    }
  }
  [[nodiscard]] std::function<void()> needed_first() {
    State::Lock lock(state_->mutex);
    std::function<void()> give = state_->needed_first(*queue_);
    state_->flush(lock);
    return give;
  }

  void push(Item item) {
    {
      const std::lock_guard lock(state_->mutex);
      state_->come(*queue_, std::move(item));
    }
    state_->changed.notify_all();
  }
  [[nodiscard]] State::Queue& queue() const { return *queue_; }

 private:
  // None: there is nothing to wait for.
  [[nodiscard]] std::shared_ptr<HostEvent> push_event() {
    {
      const std::lock_guard lock(state_->mutex);
      if (queue_->idle() && !queue_->error) return nullptr;
    }
    auto event = std::make_shared<HostEvent>();
    push({.event = event});
    return event;
  }

  std::shared_ptr<State> state_;
  std::shared_ptr<State::Queue> queue_;
};

class IssueOrder::QueueIssuer : public Issuer {
 public:
  QueueIssuer(const std::shared_ptr<State>& state, const std::shared_ptr<State::Queue>& queue)
      : state_(state),
        number_(queue->number),
        queue_(std::make_shared<IssuerQueue>(state, queue)),
        stream_(queue_) {}
  ~QueueIssuer() override {
    try {
      stream_.synchronize();
    } catch (...) {  // was reported when it happened
    }
    State::Lock lock(state_->mutex);
    state_->queues.erase(number_);
    if (!state_->turns().follows()) {
      state_->record->restart();
    } else if (state_->queues.empty()) {
      state_->record->leave();
    }
    state_->flush(lock);
    state_->changed.notify_all();
    // What it said is on its way before the engine may go.
    state_->changed.wait(lock, [this] { return !state_->sending; });
  }
  QueueIssuer(const QueueIssuer&) = delete;
  QueueIssuer& operator=(const QueueIssuer&) = delete;

  void run_ordered(OrderedTask task) override {
    queue_->push({.task = std::move(task.run),
                  .skipped = std::move(task.skipped),
                  .place = task.place,
                  .may_skip_later = task.may_skip_later,
                  .ends_step = task.ends_step,
                  .phase = task.phase});
  }
  [[nodiscard]] std::int64_t phase() const override { return state_->phase; }
  [[nodiscard]] Stream& stream() override { return stream_; }
  [[nodiscard]] std::shared_ptr<void> open() override {
    return token([](State& state, State::Queue& queue, int count) {
      queue.open += count;
      if (count > 0) state.give_here(queue);
    });
  }
  [[nodiscard]] std::shared_ptr<void> come_late() override {
    return token([](State& state, State::Queue& /*unused*/, int count) {
      state.late += count;
      state.owes = true;
    });
  }
  void give_here() override {
    const std::lock_guard lock(state_->mutex);
    state_->give_here(queue_->queue());
  }
  void on_need(std::function<void()> give) override {
    const std::lock_guard lock(state_->mutex);
    queue_->queue().give = std::move(give);
  }
  void wait(const WaitFor& wait_for) override { queue_->wait(wait_for); }
  [[nodiscard]] std::function<void()> needed_first() override { return queue_->needed_first(); }
  void meet_first() override {
    const std::lock_guard lock(state_->mutex);
    queue_->queue().meets = true;
  }
  void stop_repeating() override {
    State::Lock lock(state_->mutex);
    if (state_->failed || !state_->turns().follows() || state_->record->asked_to_stop()) return;
    state_->record->ask_to_stop();
    state_->flush(lock);
  }
  void distrust() override {
    State::Lock lock(state_->mutex);
    if (state_->failed) return;
    state_->record->distrust();
    state_->flush(lock);
  }

 private:
  // Adds one now, and takes it back when the token goes.
  using Add = void (*)(State& state, State::Queue& queue, int count);
  [[nodiscard]] std::shared_ptr<void> token(Add add) const {
    const auto add_now = [state = state_, queue = queue_, add](int count) {
      {
        const std::lock_guard lock(state->mutex);
        add(*state, queue->queue(), count);
      }
      state->changed.notify_all();
    };
    add_now(1);
    return {nullptr, [add_now](void* /*unused*/) { add_now(-1); }};
  }

  std::shared_ptr<State> state_;
  int number_;
  std::shared_ptr<IssuerQueue> queue_;
  Stream stream_;
};

IssueOrder::IssueOrder(const Communicator& world) : state_(std::make_shared<State>()) {
  state_->engine = world.engine();
  state_->group_id = world.engine()->group_id();
  state_->members = world.world_ranks();
  state_->rank = world.rank();
  // Both within the state, which has the record.
  const auto say = [state = state_.get()](const auto& entries) { state->say(entries); };
  const auto count = [state = state_.get()](int lane, std::int64_t turns) {
    const auto found = state->queues.find(lane);
    if (found != state->queues.end()) found->second->chosen += turns;
  };
  state_->record.emplace(RecordedTurns::Setting{
      .members = state_->members, .is_first = state_->rank == 0, .say = say, .count = count});
  comm::Control& control = world.engine()->control();
  const std::weak_ptr<State> weak = state_;
  on_message_ = control.listen(state_->topic(), [weak](int from, std::string_view message) {
    if (const auto state = weak.lock()) state->hear(from, message);
  });
  const auto fail = [weak] {
    const auto state = weak.lock();
    if (state == nullptr) return;
    const std::lock_guard lock(state->mutex);
    state->failed = true;
    state->changed.notify_all();
  };
  on_failure_ = control.on_failure(fail);
  if (control.failed()) fail();
  const AllSignalsBlocked blocked;
  std::thread thread([state = state_] { state->work(); });
  ::pthread_setname_np(thread.native_handle(), "hsdp-issue");
  thread.detach();
}

// Lanes are gone: nothing is left to do, and the thread ends by itself.
IssueOrder::~IssueOrder() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->changed.notify_all();
}

namespace {

// The orders of this process, each as long as its group.
struct Orders {
  struct Entry {
    std::weak_ptr<Communicator::Engine> engine;
    std::shared_ptr<IssueOrder> order;
  };
  std::mutex mutex;
  std::map<const void*, Entry> entries;  // by engine
};

Orders& orders() {
  static auto* const all = new Orders;  // outlives static objects
  return *all;
}

}  // namespace

std::shared_ptr<IssueOrder> IssueOrder::of(const Communicator& world) {
  const std::lock_guard lock(orders().mutex);
  std::erase_if(orders().entries, [](const auto& entry) { return entry.second.engine.expired(); });
  Orders::Entry& entry = orders().entries[world.engine().get()];
  if (entry.order == nullptr) {
    entry = {world.engine(), std::shared_ptr<IssueOrder>(new IssueOrder(world))};
  }
  return entry.order;
}

void IssueOrder::set_patience(std::chrono::microseconds its_patience) { patience = its_patience; }

std::chrono::microseconds IssueOrder::time_to_look() {
  constexpr std::chrono::microseconds kMost{20'000};
  return std::min(kMost, patience.load());
}

void IssueOrder::let_tasks_go_first(const comm::Control& control) {
  if (is_issuing) return;
  std::vector<std::shared_ptr<State>> of_world;
  {
    const std::lock_guard lock(orders().mutex);
    for (const auto& [_, entry] : orders().entries) {
      const auto engine = entry.engine.lock();
      if (engine != nullptr && &engine->control() == &control) {
        of_world.push_back(entry.order->state_);
      }
    }
  }
  for (const std::shared_ptr<State>& state : of_world) state->let_tasks_go_first();
}

// The first of several lanes has issued more on one rank than on another: all ranks issue without
// asking what the furthest of them has issued so far, and nobody issues while they find that out.
// Of a record that they follow nobody takes a turn meanwhile. They meet before that: until then a
// rank may have to issue for one that is not here yet.
std::unique_ptr<IssueOrder::Issuer> IssueOrder::add_issuer() {
  State& state = *state_;
  auto queue = std::make_shared<State::Queue>();
  {
    const std::lock_guard lock(state.mutex);
    queue->number = state.next_number++;
  }
  const std::string key = state.group_id + "/issue/lane/" + std::to_string(queue->number);
  Communicator world(state.engine.lock());
  world.post(key + "/meet", {});
  static_cast<void>(world.collect(key + "/meet", "set-up"));
  comm::Saying mine;
  {
    std::unique_lock lock(state.mutex);
    state.changed.wait(lock, [&] { return !state.record->is_stopping() || state.failed; });
    state.record->begin_adding(state.several);
    if (!state.several) ++state.generation;
    mine.any = {state.queues.empty() ? '\0' : '\1'};
    mine.most = {state.several ? state.turns().taken() : state.issued_alone};
    queue->heard.assign(state.members.size(), 0);
    queue->heard.front() = kAll;          // the first rank knows its own
    state.queues[queue->number] = queue;  // others may tell of it before this rank goes on
    state.paused = !state.several;
  }
  bool others = false;  // other lanes, on any rank
  std::int64_t furthest = 0;
  std::exception_ptr error;
  try {
    world.post(key, mine);
    const comm::Agreement all = world.collect(key, "set-up");
    others = all.any.front() != '\0';
    furthest = all.most.front();
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::unique_lock lock(state.mutex);
    state.paused = false;
    const bool ends_record = !error && state.rank == 0 && state.several;
    state.record->end_adding(ends_record ? std::optional(furthest) : std::nullopt);
    if (error) state.failed = true;  // nobody knows any more how far the others are
    if (error) {
      state.queues.erase(queue->number);
    } else if (!others) {
      state.several = false;
      state.issued_alone = 0;
      queue->unasked = kAll;
    } else if (!state.several) {
      state.several = true;
      for (const auto& [_, older] : state.queues) {
        if (older->unasked == kAll) older->unasked = older->chosen = furthest;
      }
    }
    state.flush(lock);
  }
  state.changed.notify_all();
  if (error) std::rethrow_exception(error);
  return std::make_unique<QueueIssuer>(state_, queue);
}

}  // namespace hsdp
