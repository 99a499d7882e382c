#include "hsdp/comm/issue_order.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/issue_order_state.h"
#include "hsdp/device/all_signals_blocked.h"

namespace hsdp {

// A lane's local tasks as a stream.
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

  void push(State::Item item) {
    {
      const std::lock_guard lock(state_->mutex);
      state_->come(*queue_, std::move(item));
    }
    state_->changed.notify_all();
  }
  [[nodiscard]] State::Queue& queue() const { return *queue_; }

 private:
  // Null if there is nothing to wait for.
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
    state_->remove(number_);
    state_->flush(lock);
    state_->changed.notify_all();
    // Its messages are sent before the engine may go.
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
  // Adds one now, and subtracts it when the handle is released.
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
  // Raw pointers, as the state owns the record that calls these.
  const auto say = [state = state_.get()](const auto& entries) { state->say(entries); };
  const auto count = [state = state_.get()](int lane, std::int64_t turns) {
    state->count_turns(lane, turns);
  };
  state_->record.emplace(comm::RecordedTurns::Setting{
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

// All lanes are gone, so the thread ends by itself.
IssueOrder::~IssueOrder() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->changed.notify_all();
}

namespace {

// The orders of this process, each kept as long as its group.
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

void IssueOrder::set_patience(std::chrono::microseconds patience) { State::patience = patience; }

std::chrono::microseconds IssueOrder::time_to_look() {
  constexpr std::chrono::microseconds kMost{20'000};
  return std::min(kMost, State::patience.load());
}

void IssueOrder::let_tasks_go_first(const comm::Control& control) {
  if (State::is_issuing) return;
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

// When a second lane comes, the first may have issued more on one rank than on another: all ranks
// issue without turns what the furthest of them has issued. While they find that out, no rank
// issues, or takes a turn of a record. All ranks meet before that, as until then one may have to
// issue for a rank that is not here yet.
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
    mine = state.begin_adding(queue);
  }
  std::optional<comm::Agreement> all;
  std::exception_ptr error;
  try {
    world.post(key, mine);
    all = world.collect(key, "set-up");
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::unique_lock lock(state.mutex);
    state.end_adding(*queue, all);
    state.flush(lock);
  }
  state.changed.notify_all();
  if (error) std::rethrow_exception(error);
  return std::make_unique<QueueIssuer>(state_, queue);
}

}  // namespace hsdp
