#include "hsdp/comm/operation_record.h"

#include <chrono>
#include <exception>
#include <utility>

#include "hsdp/device/profiler.h"

namespace hsdp {
namespace {

constexpr std::size_t kSourcesKept = 64;

constexpr std::array<std::string_view, kOperationKinds> kKindNames{
    "pack", "shard_hop", "replica_hop", "gather", "norm", "word", "update", "wait"};
constexpr std::array<std::string_view, 4> kStateNames{"begun", "issued", "done", "failed"};

}  // namespace

std::string_view name(OperationKind kind) { return kKindNames.at(static_cast<std::size_t>(kind)); }

std::string_view name(OperationState state) {
  return kStateNames.at(static_cast<std::size_t>(state));
}

std::string range_name(const OperationPlace& place) {
  const std::int64_t which = place.index >= 0 ? place.index : place.turn;
  const std::string number = which >= 0 ? " " + std::to_string(which) : "";
  return std::string(name(place.kind)) + number;
}

std::shared_ptr<const int> OperationRecord::add_source(OperationSource source) {
  const std::scoped_lock lock(mutex_);
  for (auto i = sources_.begin(); i != sources_.end() && sources_.size() >= kSourcesKept;) {
    i = i->second.user.expired() ? sources_.erase(i) : std::next(i);
  }
  auto user = std::make_shared<const int>(next_source_++);
  sources_[*user] = {std::move(source), user};
  return user;
}

bool OperationRecord::claim(Slot& slot, std::int64_t number) {
  return slot.number.compare_exchange_strong(number, kWriting, std::memory_order_acq_rel,
                                             std::memory_order_relaxed);
}

// Release and acquire keep the number's two writes around those of the rest, for who reads it
// before and after. Where another thread has been at this place for a whole turn of the ring, this
// operation is left out.
std::int64_t OperationRecord::begin(int source, const OperationPlace& place, double now_s) {
  constexpr auto kInOrder = std::memory_order_release;
  const std::int64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slots_[static_cast<std::size_t>(number) % kCapacity];
  const std::int64_t before = slot.number.load(std::memory_order_relaxed);
  if (is_traced_.load(std::memory_order_relaxed)) {
    trace_begin({.number = number, .source = source, .place = place, .begin_s = now_s});
  }
  if (before == kWriting || before > number || !claim(slot, before)) return number;
  slot.step.store(place.step, kInOrder);
  slot.microbatch.store(place.microbatch, kInOrder);
  slot.turn.store(place.turn, kInOrder);
  slot.bytes.store(place.bytes, kInOrder);
  slot.begin_s.store(now_s, kInOrder);
  slot.end_s.store(0, kInOrder);
  slot.index.store(place.index, kInOrder);
  slot.source.store(source, kInOrder);
  slot.kind.store(place.kind, kInOrder);
  slot.state.store(OperationState::kBegun, kInOrder);
  slot.number.store(number, kInOrder);
  return number;
}

void OperationRecord::end(std::int64_t number, OperationState state, double now_s) {
  if (is_traced_.load(std::memory_order_relaxed)) trace_end(number, state, now_s);
  Slot& slot = slots_[static_cast<std::size_t>(number) % kCapacity];
  if (!claim(slot, number)) return;
  slot.end_s.store(now_s, std::memory_order_release);
  slot.state.store(state, std::memory_order_release);
  slot.number.store(number, std::memory_order_release);
}

std::string OperationRecord::name_job(const std::string& name) {
  const std::scoped_lock lock(mutex_);
  if (job_.empty()) job_ = name;
  return job_;
}

OperationRecord::Contents OperationRecord::read() const {
  constexpr auto kInOrder = std::memory_order_acquire;
  Contents contents;
  const std::int64_t end = next_.load(kInOrder);
  for (std::int64_t n = std::max<std::int64_t>(0, end - std::int64_t{kCapacity}); n < end; ++n) {
    const Slot& slot = slots_[static_cast<std::size_t>(n) % kCapacity];
    if (slot.number.load(kInOrder) != n) continue;
    RecordedOperation one{.number = n};
    one.state = slot.state.load(kInOrder);  // first: an end is written before it
    one.source = slot.source.load(kInOrder);
    one.place.kind = slot.kind.load(kInOrder);
    one.place.step = slot.step.load(kInOrder);
    one.place.microbatch = slot.microbatch.load(kInOrder);
    one.place.turn = slot.turn.load(kInOrder);
    one.place.index = slot.index.load(kInOrder);
    one.place.bytes = slot.bytes.load(kInOrder);
    one.begin_s = slot.begin_s.load(kInOrder);
    one.end_s = one.state == OperationState::kBegun ? 0 : slot.end_s.load(kInOrder);
    if (slot.number.load(kInOrder) == n) contents.operations.push_back(one);
  }
  contents.sources = sources();
  const std::scoped_lock lock(mutex_);
  contents.job = job_;
  return contents;
}

std::map<int, OperationSource> OperationRecord::sources() const {
  const std::scoped_lock lock(mutex_);
  std::map<int, OperationSource> sources;
  for (const auto& [number, source] : sources_) sources.emplace(number, source.is);
  return sources;
}

bool OperationRecord::start_trace() {
  const std::scoped_lock lock(trace_mutex_);
  return !is_traced_.exchange(true);
}

OperationRecord::Trace OperationRecord::take_trace() {
  Trace trace;
  {
    const std::scoped_lock lock(trace_mutex_);
    is_traced_ = false;
    for (const auto& [number, one] : traced_) trace.contents.operations.push_back(one);
    traced_.clear();
    trace.dropped_count = std::exchange(dropped_count_, 0);
  }
  trace.contents.sources = sources();
  return trace;
}

// Threads that have seen a trace run may come when it has ended.
void OperationRecord::trace_begin(const RecordedOperation& one) {
  const std::scoped_lock lock(trace_mutex_);
  if (!is_traced_) return;
  if (traced_.size() < kMostTraced) {
    traced_.emplace(one.number, one);
  } else {
    ++dropped_count_;
  }
}

void OperationRecord::trace_end(std::int64_t number, OperationState state, double now_s) {
  const std::scoped_lock lock(trace_mutex_);
  const auto one = traced_.find(number);
  if (one == traced_.end()) return;
  one->second.state = state;
  one->second.end_s = now_s;
}

Operations::Operations(std::shared_ptr<OperationRecord> record, OperationSource source)
    : record_(std::move(record)),
      is_(std::move(source)),
      source_(record_->add_source(is_)),
      times_(std::make_shared<Times>()) {}

Operations Operations::of(const std::string& name, const std::string& lane_key) const {
  Operations other = *this;
  if (!record_) return other;
  other.is_.name = name;
  other.is_.lane_key = lane_key;
  other.source_ = record_->add_source(other.is_);
  return other;
}

double Operations::now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t Operations::begin(const OperationPlace& place, double at_s) const {
  return record_ ? record_->begin(*source_, place, at_s) : 0;
}

void Operations::end(std::int64_t number, OperationState state, double at_s) const {
  if (record_) record_->end(number, state, at_s);
}

void Operations::add(OperationKind kind, double seconds) const {
  if (times_)
    (*times_)[static_cast<std::size_t>(kind)].fetch_add(seconds, std::memory_order_relaxed);
}

double Operations::seconds(OperationKind kind) const {
  return times_ ? (*times_)[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed) : 0.0;
}

Operation::Operation(const Operations& operations, const OperationPlace& place)
    : operations_(&operations),
      kind_(place.kind),
      begin_s_(Operations::now_s()),
      number_(operations.begin(place, begin_s_)),
      exceptions_(std::uncaught_exceptions()) {
  if (profiler::is_watching()) name_for_profiler(place);
}

void Operation::name_for_profiler(const OperationPlace& place) {
  profiler::push(("hsdp:" + range_name(place)).c_str());
  is_named_ = true;
}

void Operation::leave_profiler() noexcept {
  if (std::exchange(is_named_, false)) profiler::pop();
}

Operation::Operation(Operation&& other) noexcept
    : operations_(std::exchange(other.operations_, nullptr)),
      kind_(other.kind_),
      begin_s_(other.begin_s_),
      number_(other.number_),
      exceptions_(other.exceptions_) {
  other.leave_profiler();
}

Operation::~Operation() {
  const bool failed = std::uncaught_exceptions() > exceptions_;
  end(failed ? OperationState::kFailed : OperationState::kDone);
}

void Operation::end(OperationState state) noexcept {
  const Operations* const operations = std::exchange(operations_, nullptr);
  if (operations == nullptr) return;
  leave_profiler();
  const double end_s = Operations::now_s();
  operations->end(number_, state, end_s);
  operations->add(kind_, end_s - begin_s_);
}

}  // namespace hsdp
