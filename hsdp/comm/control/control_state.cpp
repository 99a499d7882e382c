#include "hsdp/comm/control/control_state.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/descriptor_limit.h"

namespace hsdp::comm {

void ControlState::deliver(const std::string& exchange, std::optional<Agreement> agreement) {
  const std::lock_guard lock(mutex_);
  answers_[exchange] = std::move(agreement);
  changed_.notify_all();
}

void ControlState::deliver_descriptor(const std::string& exchange, int from, UniqueFd fd) {
  const std::lock_guard lock(mutex_);
  descriptors_[exchange][from] = std::move(fd);
  changed_.notify_all();
}

void ControlState::welcome(WelcomeFrame frame) {
  const std::lock_guard lock(mutex_);
  welcome_ = std::move(frame);
  changed_.notify_all();
}

void ControlState::hub_left() {
  const std::lock_guard lock(mutex_);
  hub_left_ = true;
  changed_.notify_all();
}

bool ControlState::at_descriptor_limit() const {
  constexpr std::int64_t kBetweenAttempts{1'000};
  const std::int64_t met = limit_met_ms_.load();
  return met != kNever && clock_.now().count() - met < kBetweenAttempts;
}

template <typename Ready>
void ControlState::wait_until(Lock& lock, WaitState waiting, std::uint64_t exchange, Ready ready) {
  const auto ended = [&] { return failed() || ready(); };
  if (!ended()) {
    const int slot = begin_wait(waiting, exchange);
    changed_.wait(lock, ended);
    end_wait(slot);
  }
  if (ready()) return;
  lock.unlock();
  throw_failure_of(waiting);
}

Agreement ControlState::take(const std::string& exchange, WaitState waiting) {
  Lock lock(mutex_);
  wait_until(lock, waiting, exchange_hash(exchange), [&] { return answers_.contains(exchange); });
  return std::move(answers_.extract(exchange).mapped()).value();
}

std::optional<Agreement> ControlState::take_within(const std::string& exchange, WaitState waiting,
                                                   std::chrono::milliseconds time) {
  Lock lock(mutex_);
  const auto came = [&] { return answers_.contains(exchange); };
  const int slot = begin_wait(waiting, exchange_hash(exchange));
  const bool over = changed_.wait_for(lock, time, [&] { return failed() || came(); });
  end_wait(slot);
  if (!over) return std::nullopt;
  if (came()) return std::move(answers_.extract(exchange).mapped());
  lock.unlock();
  throw_failure_of(waiting);
}

std::vector<UniqueFd> ControlState::take_descriptors(const std::string& exchange,
                                                     std::span<const int> members, int own_rank,
                                                     WaitState waiting) {
  Lock lock(mutex_);
  wait_until(lock, waiting, 0, [&] {
    const auto found = descriptors_.find(exchange);
    return found != descriptors_.end() && found->second.size() + 1 >= members.size();
  });
  auto node = descriptors_.extract(exchange);
  std::vector<UniqueFd> result;
  for (const int member : members) {
    result.push_back(member == own_rank ? UniqueFd() : std::move(node.mapped()[member]));
  }
  return result;
}

std::optional<Agreement> ControlState::take_while_open(const std::string& exchange,
                                                       WaitState waiting) {
  Lock lock(mutex_);
  // Rank 0 may have left without answering, so this exchange is not reported as awaited.
  wait_until(lock, waiting, 0, [&] { return hub_left_ || answers_.contains(exchange); });
  auto answer = answers_.extract(exchange);
  return answer.empty() ? std::nullopt : std::move(answer.mapped());
}

WelcomeFrame ControlState::await_welcome() {
  Lock lock(mutex_);
  wait_until(lock, {"rendezvous"}, 0, [&] { return welcome_.has_value(); });
  return *welcome_;
}

bool ControlState::end(const WorldEnd& world_end) {
  const std::lock_guard lock(mutex_);
  if (end_) return false;
  end_ = world_end;
  const std::vector<ActiveWait> waits = active_waits();
  if (!waits.empty()) wait_at_end_ = waits.front();
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
  return true;
}

std::optional<WorldEnd> ControlState::how_it_ended() const {
  const std::lock_guard lock(mutex_);
  return end_;
}

ControlReport ControlState::report() const {
  ControlReport report;
  for (const ActiveWait& wait : active_waits()) {
    const double seconds = std::chrono::duration<double>(wait.age).count();
    report.waits.push_back({wait.operation, wait.bucket, wait.peer, seconds});
  }
  const std::lock_guard lock(mutex_);
  if (end_) report.error = described_ ? described_->message : describe(std::nullopt).message;
  return report;
}

void ControlState::throw_failure_of(const std::optional<WaitState>& doing) const {
  Failure failure;
  {
    const std::lock_guard lock(mutex_);
    if (!described_) described_ = describe(doing);
    failure = *described_;
  }
  throw_failure(failure);
}

Failure ControlState::describe(const std::optional<WaitState>& doing) const {
  Failure failure = end_->failure;
  if (!end_->bare) return failure;
  std::string operation = operation_text(end_->operation, end_->bucket);
  std::string after = ", " + seconds_text(clock_.now()) + " after the world began";
  std::optional<ActiveWait> wait = wait_at_end_;
  if (!wait && !doing) {
    // It was about to wait when the world ended.
    const std::vector<ActiveWait> waits = active_waits();
    if (!waits.empty()) wait = waits.front();
  }
  if (wait) {
    operation = operation_text(wait->operation, wait->bucket);
    after = " after " + seconds_text(wait->age);
  } else if (doing) {
    operation = operation_text(doing->operation, doing->bucket);
  }
  if (failure.kind != FailureKind::kPeerLost) after.clear();  // its message contains the time
  failure.message = (operation.empty() ? "world" : operation) + ": " + failure.message + after +
                    "; save what you need and restart the job";
  if (failure.kind == FailureKind::kTimeout && at_descriptor_limit()) {
    failure.message += "; on this rank " + descriptor_limit_text();
  }
  return failure;
}

std::shared_ptr<void> ControlState::on_failure(std::function<void()> wake) {
  auto callback = std::make_shared<Callback>();
  callback->wake = std::move(wake);
  const std::lock_guard lock(mutex_);
  std::erase_if(callbacks_, [](const auto& weak) { return weak.expired(); });
  callbacks_.push_back(callback);
  // Dropping the handle waits for a running callback.
  return {callback.get(), [callback](void*) {
            std::function<void()> dropped;  // destroyed outside the lock
            const std::lock_guard callback_lock(callback->mutex);
            dropped.swap(callback->wake);
          }};
}

void ControlState::run_callbacks() {
  std::vector<std::shared_ptr<Callback>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& weak : callbacks_) {
      if (auto callback = weak.lock()) all.push_back(std::move(callback));
    }
  }
  for (const auto& callback : all) {
    const std::lock_guard lock(callback->mutex);
    if (callback->wake) std::exchange(callback->wake, nullptr)();
  }
}

}  // namespace hsdp::comm
