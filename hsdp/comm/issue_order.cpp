#include "hsdp/comm/issue_order.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
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
#include "hsdp/device/host_event.h"

namespace hsdp {
namespace {

thread_local bool is_issuing = false;  // the thread of an IssueOrder

constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

struct Item {
  std::function<void()> task;
  std::function<bool()> skipped{};  // empty: a local task
  int place = 0;
  bool may_skip_later = false;
  std::shared_ptr<HostEvent> event{};  // instead of a task
  bool ordered = false;                // once it is sorted
};

// Tasks of one lane: how many there are, or how many come next.
struct LaneCount {
  int lane = 0;
  std::int64_t count = 0;
};

std::string encode(const std::vector<LaneCount>& counts) {
  comm::WireWriter out;
  for (const LaneCount& entry : counts) {
    out.i32(entry.lane);
    out.u64(static_cast<std::uint64_t>(entry.count));
  }
  return out.take();
}

std::vector<LaneCount> decode(std::string_view bytes) {
  constexpr std::size_t kEntryBytes = 12;
  comm::WireReader in(bytes);
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
    std::size_t sorted = 0;    // items at the front, known to be ordered or local
    bool holds_back = false;   // a sorted one may yet change what the next ones are
    std::deque<int> places;    // of the ordered ones in the queue
    std::int64_t issued = 0;   // ordered ones that left it
    std::int64_t told = 0;     // how many the first rank knows to be ready here
    std::int64_t chosen = 0;   // how many have got their turn
    std::int64_t unasked = 0;  // how many need none, as there was one lane only: kAll, there is
    std::vector<std::int64_t> heard;  // first rank: how many are ready, by rank
    bool busy = false;                // an item is out of the queue but not done
    std::exception_ptr error;

    void sort();
    [[nodiscard]] bool idle() const { return items.empty() && !busy; }
    [[nodiscard]] bool has_local() const { return sorted > 0 && !items.front().ordered; }
    [[nodiscard]] bool has_ordered() const { return sorted > 0 && items.front().ordered; }
    [[nodiscard]] std::int64_t ready() const {
      return issued + static_cast<std::int64_t>(places.size());
    }
    [[nodiscard]] int place(std::int64_t number_in_lane) const {
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
  std::deque<LaneCount> turns;    // agreed, and still to be issued
  bool paused = false;            // until the ranks know from where on they agree
  bool failed = false;
  bool closing = false;
  int open = 0;                 // lanes that are
  std::optional<Wait> waiting;  // only the thread's
  int wait_slot = 0;

  void work();
  void let_tasks_go_first();
  bool run_one_local(Lock& lock);
  void run_front(Lock& lock, Queue& queue);
  void run_turn(Lock& lock, Queue& queue);
  [[nodiscard]] std::shared_ptr<Queue> next_in_order() const;
  [[nodiscard]] bool catches_up() const;
  [[nodiscard]] std::vector<LaneCount> take_news();
  [[nodiscard]] std::vector<LaneCount> choose_turns();
  bool speak(Lock& lock);
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
    places.push_back(item.place);
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
  if (failed || turns.empty() || catches_up()) return nullptr;
  return queues.at(turns.front().lane);
}

void IssueOrder::State::run_turn(Lock& lock, Queue& queue) {
  if (!several) {
    ++issued_alone;
  } else if (!failed && queue.issued >= queue.unasked && --turns.front().count == 0) {
    turns.pop_front();
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
  std::vector<LaneCount> choice;
  for (;;) {
    std::shared_ptr<Queue> best;
    for (const auto& [_, queue] : queues) {
      const std::int64_t next = queue->chosen;
      const bool everywhere =
          std::ranges::all_of(queue->heard, [next](std::int64_t count) { return next < count; });
      if (next >= queue->ready() || !everywhere) continue;
      if (best == nullptr || queue->place(next) < best->place(best->chosen)) best = queue;
    }
    if (best == nullptr) return choice;
    ++best->chosen;
    if (choice.empty() || choice.back().lane != best->number) choice.push_back({best->number, 0});
    ++choice.back().count;
  }
}

// Only when nothing is left to be issued: so one message speaks of all that has come meanwhile.
bool IssueOrder::State::speak(Lock& lock) {
  if (!several || paused || failed || catches_up()) return false;
  const bool chooses = rank == 0;
  const std::vector<LaneCount> counts = chooses ? choose_turns() : take_news();
  if (counts.empty()) return false;
  if (chooses) turns.insert(turns.end(), counts.begin(), counts.end());
  lock.unlock();
  try {
    if (const auto kept = engine.lock()) {
      const std::span<const int> all = members;
      for (const int peer : chooses ? all.subspan(1) : all.first(1)) {
        kept->control().tell(peer, topic(), encode(counts));
      }
    }
  } catch (const std::exception&) {  // a forked child's: its tasks find out themselves
  }
  lock.lock();
  return true;
}

// On another thread.
void IssueOrder::State::hear(int from, std::string_view message) {
  const std::lock_guard lock(mutex);
  for (const LaneCount& entry : decode(message)) {
    const auto found = queues.find(entry.lane);
    if (found == queues.end()) continue;
    Queue& queue = *found->second;
    if (rank == 0) {
      const auto member = std::ranges::find(members, from) - members.begin();
      queue.heard.at(static_cast<std::size_t>(member)) = entry.count;
    } else {
      queue.chosen += entry.count;
      turns.push_back(entry);
    }
  }
  changed.notify_all();
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
  for (const auto& [number, queue] : queues) {
    const std::int64_t next = queue->chosen;
    if (next < queue->ready()) {
      return Wait{number, next, queue->place(next), missing_peer(*queue)};
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

void IssueOrder::State::let_tasks_go_first() {
  Lock lock(mutex);
  changed.wait(lock, [this] {
    const bool idle =
        std::ranges::all_of(queues, [](const auto& entry) { return entry.second->idle(); });
    return idle || open > 0 || failed;
  });
}

void IssueOrder::State::work() {
  is_issuing = true;
  sigset_t all;  // signals are for the application's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
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
    changed.wait(lock);
  }
}

// The local tasks of a lane, as a stream.
class IssueOrder::IssuerQueue : public Stream::Queue {
 public:
  IssuerQueue(std::shared_ptr<State> state, std::shared_ptr<State::Queue> queue)
      : state_(std::move(state)), queue_(std::move(queue)) {}

  void run(std::function<void()> task) override { push({.task = std::move(task)}); }
  Event record() override {
    auto event = std::make_shared<HostEvent>();
    {
      const std::lock_guard lock(state_->mutex);
      if (queue_->idle() && !queue_->error) return {};
    }
    push({.event = event});
    return Event(std::move(event));
  }
  void wait(const Event& event) override {
    run([event] { event.wait(); });
  }
  void synchronize() override { record().wait(); }
  [[nodiscard]] Device device() const override { return {}; }

  void push(Item item) {
    {
      const std::lock_guard lock(state_->mutex);
      queue_->items.push_back(std::move(item));
    }
    state_->changed.notify_all();
  }

 private:
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
    const std::lock_guard lock(state_->mutex);
    state_->queues.erase(number_);
  }
  QueueIssuer(const QueueIssuer&) = delete;
  QueueIssuer& operator=(const QueueIssuer&) = delete;

  void run_ordered(OrderedTask task) override {
    queue_->push({.task = std::move(task.run),
                  .skipped = std::move(task.skipped),
                  .place = task.place,
                  .may_skip_later = task.may_skip_later});
  }
  [[nodiscard]] Stream& stream() override { return stream_; }
  [[nodiscard]] std::shared_ptr<void> open() override {
    add_open(*state_, 1);
    return {nullptr, [state = state_](void* /*unused*/) { add_open(*state, -1); }};
  }

 private:
  static void add_open(State& state, int count) {
    {
      const std::lock_guard lock(state.mutex);
      state.open += count;
    }
    state.changed.notify_all();
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
std::unique_ptr<IssueOrder::Issuer> IssueOrder::add_issuer() {
  State& state = *state_;
  auto queue = std::make_shared<State::Queue>();
  std::string mine;
  {
    const std::lock_guard lock(state.mutex);
    mine = (state.queues.empty() ? "0 " : "1 ") + std::to_string(state.issued_alone);
    queue->number = state.next_number++;
    queue->heard.assign(state.members.size(), 0);
    queue->heard.front() = kAll;          // the first rank knows its own
    state.queues[queue->number] = queue;  // others may tell of it before this rank goes on
    state.paused = !state.several;
  }
  const std::string key = state.group_id + "/issue/lane/" + std::to_string(queue->number);
  bool others = false;  // other lanes, on any rank
  std::int64_t furthest = 0;
  std::exception_ptr error;
  try {
    Communicator world(state.engine.lock());
    world.post(key, mine);
    for (const std::string& text : world.collect(key, "set-up")) {
      others = others || text.front() == '1';
      furthest = std::max<std::int64_t>(furthest, std::stoll(text.substr(2)));
    }
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(state.mutex);
    state.paused = false;
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
  }
  state.changed.notify_all();
  if (error) std::rethrow_exception(error);
  return std::make_unique<QueueIssuer>(state_, queue);
}

}  // namespace hsdp
