#include "hsdp/comm/control/in_process_control.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/timeout_range.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

std::string exchange_key(std::string_view key, std::span<const int> members) {
  std::string text(key);
  for (const int member : members) text += "," + std::to_string(member);
  return text;
}

class InProcessControl : public Control {
 public:
  InProcessControl(std::shared_ptr<InProcessHub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return hub_->size(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return hub_->timeout(); }
  [[nodiscard]] bool shares_memory_with(int /*peer*/) const override { return true; }
  [[nodiscard]] bool in_process() const override { return true; }
  [[nodiscard]] std::string address() const override { return "127.0.0.1"; }
  [[nodiscard]] const std::string& secret() const override { return secret_; }

  void post(std::string_view key, std::span<const int> members, std::string_view message) override {
    hub_->post(exchange_key(key, members), members, rank_, message);
  }
  [[nodiscard]] std::vector<std::string> collect(std::string_view key, std::span<const int> members,
                                                 WaitState waiting) override {
    return *hub_->collect_until(exchange_key(key, members), members, rank_, waiting,
                                InProcessHub::Clock::time_point::max());
  }
  [[nodiscard]] std::optional<std::vector<std::string>> collect_within(
      std::string_view key, std::span<const int> members, WaitState waiting,
      std::chrono::milliseconds time) override {
    return hub_->collect_until(exchange_key(key, members), members, rank_, waiting,
                               InProcessHub::Clock::now() + time);
  }
  void tell(int peer, std::string_view topic, std::string_view message) override {
    hub_->tell(rank_, peer, topic, message);
  }
  [[nodiscard]] std::shared_ptr<void> listen(std::string_view topic, Hear hear) override {
    return hub_->listen(rank_, topic, std::move(hear));
  }
  [[nodiscard]] std::vector<UniqueFd> exchange_descriptors(std::string_view key,
                                                           std::span<const int> members,
                                                           int fd) override;

  [[nodiscard]] std::vector<ControlLinkStats> links() const override {
    return hub_->traffic(rank_).links();
  }
  [[nodiscard]] int begin_wait(WaitState state) override { return hub_->begin_wait(rank_, state); }
  void end_wait(int slot) override { hub_->end_wait(slot); }
  void fail(const Failure& failure) override { hub_->fail(failure); }
  [[nodiscard]] bool failed() const override { return hub_->failed(); }
  void throw_if_failed() const override { hub_->throw_if_failed(); }
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake) override {
    const int number = hub_->add_callback(std::move(wake));
    return {nullptr, [weak = std::weak_ptr(hub_), number](void*) {
              if (const auto hub = weak.lock()) hub->remove_callback(number);
            }};
  }

 private:
  std::shared_ptr<InProcessHub> hub_;
  int rank_;
  std::string secret_;
};

std::vector<UniqueFd> InProcessControl::exchange_descriptors(std::string_view key,
                                                             std::span<const int> members, int fd) {
  const std::string prefix(key);
  const auto numbers =
      exchange(prefix + "#fd", members, std::to_string(fd), {.operation = "exchange"});
  std::vector<UniqueFd> descriptors(members.size());
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank_) continue;
    descriptors[i].reset(::fcntl(std::stoi(numbers[i]), F_DUPFD_CLOEXEC, 0));
  }
  // Nobody closes its own before everyone has a copy.
  static_cast<void>(exchange(prefix + "#taken", members, "", {.operation = "exchange"}));
  return descriptors;
}

}  // namespace

InProcessHub::InProcessHub(int size, std::chrono::milliseconds timeout)
    : size_(size),
      timeout_(timeout),
      listeners_(static_cast<std::size_t>(size)),
      traffic_(static_cast<std::size_t>(size)),
      watch_([this] { watch(); }) {}

InProcessHub::~InProcessHub() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  watch_.join();
}

void InProcessHub::post(const std::string& key, std::span<const int> /*members*/, int rank,
                        std::string_view message) {
  {
    const std::lock_guard lock(mutex_);
    exchanges_[key].messages.emplace(rank, message);
  }
  traffic(rank).add_sent(0, key.size() + message.size());
  changed_.notify_all();
}

std::optional<std::vector<std::string>> InProcessHub::collect_until(const std::string& key,
                                                                    std::span<const int> members,
                                                                    int rank, WaitState waiting,
                                                                    Clock::time_point end) {
  std::unique_lock lock(mutex_);
  const auto missing = [&, &exchange = exchanges_[key]] { return missing_in(exchange, members); };
  const int slot = next_slot_++;
  bool late = false;
  for (auto absent = missing(); absent != members.end() && !failure_ && !late; absent = missing()) {
    if (waiting.peer != *absent || !waits_.contains(slot)) {
      waiting.peer = *absent;
      waits_[slot] = {rank, waiting, Clock::now()};
    }
    late = changed_.wait_until(lock, end) == std::cv_status::timeout;
  }
  waits_.erase(slot);
  if (missing() == members.end()) {
    std::vector<std::string> all = take(key, members);
    std::size_t bytes = key.size();
    for (const std::string& message : all) bytes += message.size();
    traffic(rank).add_received(0, bytes);
    return all;
  }
  if (failure_) throw_failure(*failure_);
  return std::nullopt;
}

std::span<const int>::iterator InProcessHub::missing_in(const Exchange& exchange,
                                                        std::span<const int> members) {
  return std::ranges::find_if(members, [&](int m) { return !exchange.messages.contains(m); });
}

std::vector<std::string> InProcessHub::take(const std::string& key, std::span<const int> members) {
  Exchange& exchange = exchanges_[key];
  std::vector<std::string> messages;
  for (const int member : members) messages.push_back(exchange.messages.at(member));
  if (++exchange.collected == members.size()) exchanges_.erase(key);
  return messages;
}

void InProcessHub::tell(int from, int peer, std::string_view topic, std::string_view message) {
  require_other_rank(peer, from, size_);
  if (failed()) return;
  traffic(from).add_sent(0, topic.size() + message.size());
  traffic(peer).add_received(0, topic.size() + message.size());
  listeners_[static_cast<std::size_t>(peer)].call(topic, from, message);
}

std::shared_ptr<void> InProcessHub::listen(int rank, std::string_view topic, Control::Hear hear) {
  return listeners_[static_cast<std::size_t>(rank)].add(topic, std::move(hear));
}

int InProcessHub::begin_wait(int rank, WaitState state) {
  const std::lock_guard lock(mutex_);
  waits_[next_slot_] = {rank, state, Clock::now()};
  return next_slot_++;
}

void InProcessHub::end_wait(int slot) {
  const std::lock_guard lock(mutex_);
  waits_.erase(slot);
}

void InProcessHub::fail(const Failure& failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    failed_.store(true);
  }
  changed_.notify_all();
}

void InProcessHub::throw_if_failed() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  throw_failure(*failure_);
}

int InProcessHub::add_callback(std::function<void()> wake) {
  const std::lock_guard lock(callbacks_mutex_);
  if (callbacks_ran_) return -1;
  callbacks_.emplace(next_callback_, std::move(wake));
  return next_callback_++;
}

void InProcessHub::remove_callback(int number) {
  const std::lock_guard lock(callbacks_mutex_);
  callbacks_.erase(number);
}

void InProcessHub::run_callbacks() {
  const std::lock_guard lock(callbacks_mutex_);
  callbacks_ran_ = true;
  for (const auto& [_, wake] : callbacks_) wake();
  callbacks_.clear();
}

void InProcessHub::watch() {
  using std::chrono::milliseconds;
  const auto period = std::clamp<milliseconds>(timeout_ / 10, milliseconds(2), milliseconds(250));
  std::unique_lock lock(mutex_);
  auto next_look = Clock::now() + period;
  while (!closing_) {
    changed_.wait_until(lock, next_look, [&] { return closing_ || failure_.has_value(); });
    next_look = Clock::now() + period;
    if (!failure_) {
      failure_ = judge();
      failed_.store(failure_.has_value());
    }
    if (!failure_) continue;
    lock.unlock();
    changed_.notify_all();
    run_callbacks();
    lock.lock();
    changed_.wait(lock, [&] { return closing_; });
  }
}

std::optional<Failure> InProcessHub::judge() const {
  const Wait* oldest = nullptr;
  for (const auto& [_, wait] : waits_) {
    if (oldest == nullptr || wait.since < oldest->since) oldest = &wait;
  }
  if (oldest == nullptr || Clock::now() - oldest->since < timeout_) return std::nullopt;
  Failure failure{.kind = FailureKind::kTimeout, .message = {}, .ranks = chain_end(oldest->rank)};
  failure.message = operation_text(oldest->state.operation, oldest->state.bucket) + ": " +
                    ranks_text(failure.ranks, size_) + " did not arrive within " +
                    seconds_text(std::chrono::duration_cast<std::chrono::milliseconds>(
                        Clock::now() - oldest->since)) +
                    "; save what you need and restart the job";
  return failure;
}

// Follows who waits for whom to the rank that waits for nobody; in a circle, all of it.
std::vector<int> InProcessHub::chain_end(int rank) const {
  std::vector<int> chain;
  while (std::ranges::find(chain, rank) == chain.end()) {
    chain.push_back(rank);
    const auto wait =
        std::ranges::find_if(waits_, [&](const auto& entry) { return entry.second.rank == rank; });
    if (wait == waits_.end() || wait->second.state.peer < 0) return {rank};
    rank = wait->second.state.peer;
  }
  chain.erase(chain.begin(), std::ranges::find(chain, rank));
  std::ranges::sort(chain);
  return chain;
}

std::vector<std::shared_ptr<Control>> in_process_control(int size,
                                                         std::chrono::milliseconds timeout) {
  if (size < 1) {
    throw UsageError({.where = "in_process_control",
                      .expected = "at least 1 rank",
                      .got = std::to_string(size)});
  }
  require_timeout(timeout, "in_process_control: timeout");
  const auto hub = std::make_shared<InProcessHub>(size, timeout);
  std::vector<std::shared_ptr<Control>> controls;
  controls.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    controls.push_back(std::make_shared<InProcessControl>(hub, rank));
  }
  return controls;
}

}  // namespace hsdp::comm
