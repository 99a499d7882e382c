#include "hsdp/comm/issue_order.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/device/host_event.h"

namespace hsdp {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr int kAnyLane = std::numeric_limits<int>::max();
constexpr std::chrono::milliseconds kLookPeriod{50};  // for a failed world, while nothing comes

struct Item {
  std::function<void()> task;
  std::function<bool()> skipped;  // empty: a local task
  int place = 0;
  std::shared_ptr<HostEvent> event;  // instead of a task
};

}  // namespace

struct IssueOrder::State {
  struct Queue {
    int number = 0;
    std::deque<Item> items;
    bool busy = false;  // an item is out of the queue but not done
    std::exception_ptr error;
    [[nodiscard]] bool idle() const { return items.empty() && !busy; }
    // The first item is for all ranks.
    [[nodiscard]] bool waits_for_order() const {
      return !items.empty() && items.front().skipped && !items.front().skipped();
    }
  };
  using Lock = std::unique_lock<std::mutex>;

  std::weak_ptr<Communicator::Engine> engine;
  std::string group_id;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::shared_ptr<Queue>> queues;
  int next_number = 0;
  std::int64_t issued = 0;          // ordered items so far
  std::int64_t asks_from = kNever;  // the first item whose turn the ranks agree on
  int asks_since = kAnyLane;        // the lane that made them ask: items before are of older ones
  bool paused = false;              // until the ranks know from where on they ask
  bool closing = false;

  void work();
  bool run_one_local(Lock& lock);
  void run_front(Lock& lock, Queue& queue);
  // The first in turn, of the lanes before that number.
  [[nodiscard]] std::shared_ptr<Queue> next_ready(int before = kAnyLane) const;
  [[nodiscard]] std::shared_ptr<Queue> agree_on_next(Lock& lock);
  [[nodiscard]] std::shared_ptr<Queue> next_in_order(Lock& lock);
  [[nodiscard]] bool world_failed() const;
};

void IssueOrder::State::run_front(Lock& lock, Queue& queue) {
  Item item = std::move(queue.items.front());
  queue.items.pop_front();
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
  queue.busy = false;
  changed.notify_all();
}

bool IssueOrder::State::run_one_local(Lock& lock) {
  for (const auto& [_, queue] : queues) {
    if (queue->items.empty() || queue->waits_for_order()) continue;
    const std::shared_ptr<Queue> kept = queue;  // the lane may be gone when it comes back
    run_front(lock, *kept);
    return true;
  }
  return false;
}

std::shared_ptr<IssueOrder::State::Queue> IssueOrder::State::next_ready(int before) const {
  std::shared_ptr<Queue> next;
  for (const auto& [number, queue] : queues) {
    if (number >= before || !queue->waits_for_order()) continue;
    if (next == nullptr || queue->items.front().place < next->items.front().place) next = queue;
  }
  return next;
}

bool IssueOrder::State::world_failed() const {
  const auto kept = engine.lock();
  return kept == nullptr || kept->control().failed();
}

// Asks the first rank, which chose before it asked. The lane that it names may have to catch up.
std::shared_ptr<IssueOrder::State::Queue> IssueOrder::State::agree_on_next(Lock& lock) {
  const auto ready = next_ready();
  int number = ready->number;
  const std::string key = group_id + "/issue/" + std::to_string(issued);
  lock.unlock();
  try {
    if (auto kept = engine.lock()) {
      Communicator world(std::move(kept));
      world.post(key, std::to_string(number));
      number = std::stoi(world.collect(key, "issue order").front());
    }
  } catch (const std::exception&) {  // the world's failure: its tasks find out themselves
  }
  lock.lock();
  for (;;) {
    if (world_failed()) return next_ready();
    const auto queue = queues.find(number);
    if (queue != queues.end() && queue->second->waits_for_order()) return queue->second;
    if (!run_one_local(lock)) changed.wait_for(lock, kLookPeriod);
  }
}

// Empty: what comes next on all ranks is not there yet.
std::shared_ptr<IssueOrder::State::Queue> IssueOrder::State::next_in_order(Lock& lock) {
  if (paused) return nullptr;
  if (world_failed()) return next_ready();
  if (issued < asks_from) return next_ready(asks_since);
  return next_ready() == nullptr ? nullptr : agree_on_next(lock);
}

void IssueOrder::State::work() {
  sigset_t all;  // signals are for the application's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  Lock lock(mutex);
  for (;;) {
    if (run_one_local(lock)) continue;
    if (const auto next = next_in_order(lock)) {
      ++issued;
      run_front(lock, *next);
      continue;
    }
    if (next_ready() != nullptr) {
      changed.wait_for(lock, kLookPeriod);  // a failed world has no order to wait for
    } else if (closing) {
      return;
    } else {
      changed.wait(lock);
    }
  }
}

// The local tasks of a lane, as a stream.
class IssueOrder::LaneQueue : public Stream::Queue {
 public:
  LaneQueue(std::shared_ptr<State> state, std::shared_ptr<State::Queue> queue)
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

class IssueOrder::LaneOfQueue : public Lane {
 public:
  LaneOfQueue(const std::shared_ptr<State>& state, const std::shared_ptr<State::Queue>& queue)
      : state_(state),
        number_(queue->number),
        queue_(std::make_shared<LaneQueue>(state, queue)),
        stream_(queue_) {}
  ~LaneOfQueue() override {
    try {
      stream_.synchronize();
    } catch (...) {  // was reported when it happened
    }
    const std::lock_guard lock(state_->mutex);
    state_->queues.erase(number_);
  }
  LaneOfQueue(const LaneOfQueue&) = delete;
  LaneOfQueue& operator=(const LaneOfQueue&) = delete;

  void run_ordered(std::function<void()> task, int place, std::function<bool()> skipped) override {
    queue_->push({.task = std::move(task), .skipped = std::move(skipped), .place = place});
  }
  [[nodiscard]] Stream& stream() override { return stream_; }

 private:
  std::shared_ptr<State> state_;
  int number_;
  std::shared_ptr<LaneQueue> queue_;
  Stream stream_;
};

IssueOrder::IssueOrder(const Communicator& world) : state_(std::make_shared<State>()) {
  state_->engine = world.engine();
  state_->group_id = world.engine()->group_id();
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

std::shared_ptr<IssueOrder> IssueOrder::of(const Communicator& world) {
  struct Entry {
    std::weak_ptr<Communicator::Engine> engine;
    std::shared_ptr<IssueOrder> order;
  };
  static std::mutex mutex;
  static auto* const entries = new std::map<const void*, Entry>;  // outlives static objects
  const std::lock_guard lock(mutex);
  std::erase_if(*entries, [](const auto& entry) { return entry.second.engine.expired(); });
  Entry& entry = (*entries)[world.engine().get()];
  if (entry.order == nullptr) {
    entry = {world.engine(), std::shared_ptr<IssueOrder>(new IssueOrder(world))};
  }
  return entry.order;
}

// Ranks may be at different items of the older lanes: they ask from the one on that is furthest.
std::unique_ptr<IssueOrder::Lane> IssueOrder::add_lane() {
  State& state = *state_;
  auto queue = std::make_shared<State::Queue>();
  std::string mine;
  {
    const std::lock_guard lock(state.mutex);
    state.paused = true;
    mine = std::to_string(state.issued);
    queue->number = state.next_number++;
    state.queues[queue->number] = queue;  // the first rank may name it before this one goes on
  }
  const std::string key = state.group_id + "/issue/lane/" + std::to_string(queue->number);
  std::int64_t furthest = 0;
  const auto resume = [&] {
    {
      const std::lock_guard lock(state.mutex);
      state.paused = false;
      if (queue->number > 0 && state.asks_from == kNever) {
        state.asks_from = furthest;
        state.asks_since = queue->number;
      }
    }
    state.changed.notify_all();
  };
  try {
    Communicator world(state.engine.lock());
    world.post(key, mine);
    for (const std::string& count : world.collect(key, "Reducer")) {
      furthest = std::max(furthest, static_cast<std::int64_t>(std::stoll(count)));
    }
  } catch (...) {
    resume();
    const std::lock_guard lock(state.mutex);
    state.queues.erase(queue->number);
    throw;
  }
  resume();
  return std::make_unique<LaneOfQueue>(state_, queue);
}

}  // namespace hsdp
