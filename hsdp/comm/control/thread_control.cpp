// Control for ranks that are threads of one process: rank 0's hub and the members of all ranks in
// one object, linked through memory.
#include <fcntl.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "hsdp/comm/control/control_hub.h"
#include "hsdp/comm/control/control_member.h"
#include "hsdp/comm/control/rank_control.h"
#include "hsdp/comm/timeout_range.h"
#include "hsdp/comm/world.h"
#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using Millis = std::chrono::milliseconds;

std::string_view body_of(const FrameBytes& frame) {
  return std::string_view{*frame}.substr(kFrameHeaderBytes);
}

// The sending thread delivers a message to its rank directly, unless a listener hears it or it
// comes after such a message. Those are delivered by a separate thread, so that a listener may
// send, lock and close anything. It must not wait for long, because that thread also ticks.
class ThreadWorld : public std::enable_shared_from_this<ThreadWorld> {
 public:
  ThreadWorld(int size, Millis timeout) : ranks_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      Rank& made = ranks_[static_cast<std::size_t>(rank)];
      made.state = std::make_shared<ControlState>();
      made.member = std::make_unique<ControlMember>(
          made.state, rank, size, timeout,
          ControlMember::Handlers{[this, rank](FrameType type, const std::string& body) {
                                    hub_->handle(rank, type, body);
                                  },
                                  [this] { end_is_due_ = true; }});
    }
    JoinFrame own{.size = size};
    hub_ = std::make_unique<ControlHub>(
        ranks_[0].state->clock(), ControlHub::Options{own, "", timeout, [] { return ""; }},
        [this](FrameType type, std::string_view body) { pass(0, make_frame(type, body)); });
    for (own.rank = 1; own.rank < size; ++own.rank) {
      hub_->join(std::make_shared<MemoryLink>(*this, own.rank), own);
    }
    hub_->welcome_if_complete();
  }

  void start() {
    const AllSignalsBlocked blocked;
    thread_ = std::thread([world = shared_from_this()] { world->run(); });
  }
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    // A listener may have dropped the last control.
    thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
  }

  [[nodiscard]] const std::shared_ptr<ControlState>& state(int rank) const {
    return ranks_[static_cast<std::size_t>(rank)].state;
  }
  void handle(int rank, FrameType type, std::string_view body) {
    state(rank)->traffic().add_sent(0, kFrameHeaderBytes + body.size());
    const std::lock_guard lock(mutex_);
    hub_->handle(rank, type, body);
    if (end_is_due_) changed_.notify_all();
  }
  void end(int rank, const WorldEnd& world_end) {
    const std::lock_guard lock(mutex_);
    ranks_[static_cast<std::size_t>(rank)].member->fail(world_end);
    changed_.notify_all();
  }
  void run_callbacks_soon() {
    const std::lock_guard lock(mutex_);
    end_is_due_ = true;
    changed_.notify_all();
  }

 private:
  struct Rank {
    std::shared_ptr<ControlState> state;
    std::unique_ptr<ControlMember> member;
    std::size_t waiting = 0;  // messages in the queue
  };
  class MemoryLink : public FrameLink {
   public:
    MemoryLink(ThreadWorld& world, int rank) : world_(world), rank_(rank) {}
    void send(FrameBytes frame) override { world_.pass(rank_, std::move(frame)); }
    [[nodiscard]] bool idle() const override { return false; }  // threads need no beats
    [[nodiscard]] bool open() const override { return true; }
    void finish_sending() override {}
    void close() override {}

   private:
    ThreadWorld& world_;
    int rank_;
  };

  void pass(int rank, FrameBytes frame) {
    Rank& receiver = ranks_[static_cast<std::size_t>(rank)];
    receiver.state->traffic().add_received(0, frame->size());
    const FrameType type = type_of(*frame);
    if (type != FrameType::kTell && receiver.waiting == 0) {
      return receiver.member->frame(type, body_of(frame));
    }
    ++receiver.waiting;
    queue_.emplace_back(rank, std::move(frame));
    changed_.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!closing_) {
      try {
        work(lock);
      } catch (const std::exception& error) {
        if (!lock) lock.lock();
        hub_->end(end_by_error(0, error));
        end_is_due_ = true;  // for callbacks not called yet
      }
    }
  }

  void work(std::unique_lock<std::mutex>& lock) {
    changed_.wait_until(lock, next_tick_,
                        [&] { return closing_ || end_is_due_ || !queue_.empty(); });
    if (std::chrono::steady_clock::now() >= next_tick_) {
      next_tick_ = std::chrono::steady_clock::now() + OwnClock::kTick;
      tick();
    }
    if (!queue_.empty() && !closing_) pass_first(lock);
    if (std::exchange(end_is_due_, false)) {
      lock.unlock();
      for (const Rank& rank : ranks_) rank.state->run_callbacks();
      lock.lock();
    }
  }

  void pass_first(std::unique_lock<std::mutex>& lock) {
    const auto [rank, frame] = std::move(queue_.front());
    queue_.pop_front();
    Rank& receiver = ranks_[static_cast<std::size_t>(rank)];
    const FrameType type = type_of(*frame);
    if (type == FrameType::kTell) lock.unlock();
    try {
      receiver.member->frame(type, body_of(frame));
    } catch (...) {
      if (!lock) lock.lock();
      --receiver.waiting;
      throw;
    }
    if (!lock) lock.lock();
    --receiver.waiting;
  }

  void tick() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank].state->clock().tick();
      hub_->handle(static_cast<int>(rank), FrameType::kBeat, ranks_[rank].member->beat().encode());
    }
    hub_->tick();
  }

  std::mutex mutex_;  // guards everything below, except the states, which have their own locks
  std::condition_variable changed_;
  std::vector<Rank> ranks_;
  std::unique_ptr<ControlHub> hub_;
  std::deque<std::pair<int, FrameBytes>> queue_;
  std::chrono::steady_clock::time_point next_tick_ =
      std::chrono::steady_clock::now() + OwnClock::kTick;
  bool end_is_due_ = false;
  bool closing_ = false;
  std::thread thread_;  // keeps the world alive until it ends
};

class ThreadControl final : public RankControl {
 public:
  ThreadControl(std::shared_ptr<ThreadWorld> world, std::shared_ptr<void> users, int rank, int size,
                Millis timeout)
      : RankControl(rank, size, timeout), world_(std::move(world)), users_(std::move(users)) {
    set_state(world_->state(rank));
  }
  ~ThreadControl() override {
    if (!failed()) world_->handle(rank(), FrameType::kGoodbye, {});
  }
  ThreadControl(const ThreadControl&) = delete;
  ThreadControl& operator=(const ThreadControl&) = delete;

  [[nodiscard]] bool shares_memory_with(int /*peer*/) const override { return true; }
  [[nodiscard]] bool in_process() const override { return true; }
  [[nodiscard]] std::string address() const override { return "127.0.0.1"; }
  [[nodiscard]] const std::string& secret() const override { return secret_; }
  [[nodiscard]] std::vector<UniqueFd> exchange_descriptors(std::string_view key,
                                                           std::span<const int> members,
                                                           int fd) override {
    const std::string prefix(key);
    const WaitState waiting{.operation = "exchange_descriptors"};
    const auto numbers = exchange(prefix + "#fd", members, std::to_string(fd), waiting);
    std::vector<UniqueFd> descriptors(members.size());
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (members[i] == rank()) continue;
      descriptors[i].reset(::fcntl(std::stoi(numbers[i]), F_DUPFD_CLOEXEC, 0));
    }
    // No rank closes its descriptors before all have copies.
    static_cast<void>(exchange(prefix + "#taken", members, "", waiting));
    return descriptors;
  }

 protected:
  void send(FrameType type, std::string body) override { world_->handle(rank(), type, body); }
  void end_world(const WorldEnd& world_end) override { world_->end(rank(), world_end); }
  void run_callbacks_soon() override { world_->run_callbacks_soon(); }

 private:
  std::shared_ptr<ThreadWorld> world_;
  std::shared_ptr<void> users_;  // the last one closes the world
  std::string secret_;
};

}  // namespace

std::vector<std::shared_ptr<Control>> in_process_control(int size, Millis timeout) {
  if (size < 1) {
    throw UsageError({.where = "in_process_control",
                      .expected = "at least 1 rank",
                      .got = std::to_string(size)});
  }
  require_timeout(timeout, "in_process_control: timeout");
  const auto world = std::make_shared<ThreadWorld>(size, timeout);
  world->start();
  const std::shared_ptr<void> users(nullptr, [world](void*) { world->close(); });
  std::vector<std::shared_ptr<Control>> controls;
  controls.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    controls.push_back(std::make_shared<ThreadControl>(world, users, rank, size, timeout));
  }
  return controls;
}

}  // namespace hsdp::comm
