#include "hsdp/reducer/collector.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "hsdp/device/profiler.h"
#include "hsdp/error.h"

namespace hsdp::reducer {

Collector::Collector(const Setting& setting)
    : parameters_(setting.parameters),
      layout_(setting.layout),
      memory_(setting.memory),
      pipeline_(setting.pipeline),
      outcome_(setting.outcome),
      pack_order_(setting.order),
      has_shard_hop_(setting.has_shard_hop),
      holes_(setting.holes),
      packs_(setting.device, setting.world, setting.holes),
      operations_(setting.operations),
      arrived_(static_cast<std::size_t>(parameters_.size())),
      added_(arrived_.size()),
      accepted_(arrived_.size()),
      early_holes_(arrived_.size()),
      accumulated_(arrived_.size()),
      kept_(arrived_.size()),
      states_(layout_.buckets().size()),
      issuer_(setting.issuer) {
  if (has_shard_hop_) {
    for (int slot = 0; slot < slot_count(pack_order_); ++slot) {
      free_slots_.emplace_back(slot, Event());
    }
  } else if (layout_.shard_size() > 1) {
    carry_runs_.resize(arrived_.size());
    for (int b = 0; b < std::ssize(states_); ++b) {
      for (const BucketSegment& segment : layout_.segments(b)) {
        carry_runs_[static_cast<std::size_t>(segment.parameter)].push_back(
            {b, segment.flat_offset, segment.bucket_offset, segment.count});
      }
    }
  }
  if (issuer_) issuer_->on_need([this] { give_next(); });
}

Collector::~Collector() {
  if (issuer_) issuer_->on_need({});
}

const GroupPlan& Collector::group_of(int parameter) const {
  return plan_->group(parameters_.group_of(parameter));
}

BucketRun Collector::buckets_of(int parameter) const {
  if (parameters_.count(parameter) == 0) return {};
  return layout_.buckets_of(parameter);
}

// Whether a fresh gradient of that parameter is added to a local sum instead of being packed.
bool Collector::accumulates(int parameter) const {
  return group_of(parameter).sync == Sync::kNone || plan_->intake.adds;
}

void Collector::begin(std::shared_ptr<const MicrobatchPlan> plan) {
  const PackStreams::Farewell farewell(packs_);
  Lock lock(mutex_);
  packs_.join();  // local sums are written for one slot and read for another
  open_ = true;
  not_captured_.reset();
  if (issuer_) issuer_open_ = issuer_->open();
  last_giver_ = std::this_thread::get_id();
  plan_ = std::move(plan);
  std::ranges::fill(arrived_, 0);
  if (plan_->begins_step) present_.assign(arrived_.size(), '0');
  std::ranges::fill(added_, 0);
  std::ranges::fill(accepted_, 0);
  std::ranges::fill(early_holes_, 0);
  order_.clear();
  next_slot_ = next_launch_ = 0;
  unpacked_ = 0;
  for (std::size_t b = 0; b < states_.size(); ++b) {
    const Bucket& bucket = layout_.buckets()[b];
    const GroupPlan& group = plan_->group(bucket.group);
    states_[b] = {};
    if (issuer_) states_[b].phase = issuer_->phase();
    if (group.sync == Sync::kNone || bucket.count == 0) continue;
    order_.push_back(static_cast<int>(b));
  }
  for (int p = 0; p < parameters_.size(); ++p) {
    const GroupPlan& group = group_of(p);
    if (group.sync == Sync::kNone || !group.reduces()) continue;
    const BucketRun buckets = buckets_of(p);
    for (int b = buckets.first; b < buckets.end; ++b) {
      ++states_[static_cast<std::size_t>(b)].unpacked;
      ++unpacked_;
    }
  }
  assign_slots();
  launch_complete(lock);
}

bool Collector::arrive(int parameter, StridedView gradient, GradientOwner owner,
                       const ValidAfter& valid) {
  const auto p = static_cast<std::size_t>(parameter);
  const PackStreams::Farewell farewell(packs_);
  Lock lock(mutex_);
  if (!open_) return true;  // another thread has dropped the step
  const std::int64_t most = plan_->intake.most;
  if (most != Intake::kAnyNumber && arrived_[p] >= most) return false;
  require_no_capture(valid);
  require_not_sent(parameter);
  if (issuer_ && last_giver_ != std::this_thread::get_id()) {
    last_giver_ = std::this_thread::get_id();
    issuer_->give_here();
  }
  ++arrived_[p];
  present_[p] = '1';
  if (!accumulates(parameter)) {
    kept_[p] = {std::move(gradient), std::move(owner), valid, false, 0, 0};
    if (plan_->packs_late) {
      retain(kept_[p]);
    } else {
      accept(lock, parameter);
    }
    return true;
  }
  add_locally(lock, parameter, gradient, std::move(owner), valid);
  if (open_) {
    // Another thread may have counted its gradient without having added it yet.
    const bool is_complete = ++added_[p] == most;
    const bool sends = group_of(parameter).sync != Sync::kNone && !plan_->packs_late;
    if (is_complete && sends) accept_sum(lock, parameter, false);
  }
  wake_waiter();
  return true;
}

void Collector::require_no_capture(const ValidAfter& valid) {
  if (packs_.on_host() || !valid.stream) return;
  if (not_captured_ && not_captured_->same_queue(*valid.stream)) return;
  valid.stream->require_no_capture();
  not_captured_ = valid.stream;
}

void Collector::require_not_sent(int parameter) const {
  if (early_holes_[static_cast<std::size_t>(parameter)] == 0) return;
  issuer_->distrust();
  throw UsageError(
      {.where = "reducer: gradient of '" + parameters_.spec(parameter).name + "'",
       .expected = "it before this rank waits for a later collective, as in the steps before",
       .got = "it after that, when its bucket was sent without it",
       .remedy = "begin a new step on every rank; let each step that repeats earlier ones compute "
                 "its gradients in the same order on every rank"});
}

void Collector::add_locally(Lock& lock, int parameter, const StridedView& gradient,
                            GradientOwner owner, const ValidAfter& valid) {
  const bool may_repeat = plan_->intake.most != 1;
  run(lock, [&] {
    Lock repeats(repeats_mutex_, std::defer_lock);
    if (may_repeat) repeats.lock();
    packs_.wait(PackStreams::kSums, valid);
    accumulate(parameter, {&gradient, {}, false});
    packs_.hold(PackStreams::kSums, std::move(owner));
  });
  launch_packs(lock, PackStreams::kSums, false);
}

void Collector::accumulate(int parameter, const Contribution& contribution) {
  const auto p = static_cast<std::size_t>(parameter);
  Contribution whole = contribution;
  const TensorView accumulator = memory_.accumulator(parameter);
  if (accumulated_[p] != 0) whole.accumulated = accumulator;
  kernels::PackQueue& queue = packs_.queue(PackStreams::kSums);
  if (queue.writes(accumulator.data)) packs_.launch(PackStreams::kSums);
  add_to_accumulator(whole, accumulator, queue);
  accumulated_[p] = 1;
}

void Collector::accept_sum(Lock& lock, int parameter, bool hole) {
  static const StridedView kNothing;
  kept_[static_cast<std::size_t>(parameter)] = {kNothing, {}, {}, hole, 0, 0};
  accept(lock, parameter);
}

// Packs the pieces of a parameter in kept_ whose buckets have slots, and keeps the rest.
void Collector::accept(Lock& lock, int parameter) {
  const auto p = static_cast<std::size_t>(parameter);
  Kept& kept = kept_[p];
  accepted_[p] = 1;
  const BucketRun buckets = buckets_of(parameter);
  for (int b = buckets.first; b < buckets.end; ++b) {
    if (!has_shard_hop_ || states_[static_cast<std::size_t>(b)].slot >= 0) begin_pack(b);
    if (issuer_) states_[static_cast<std::size_t>(b)].phase = issuer_->phase();
  }
  kept.unpacked_pieces = buckets.count();
  if (buckets.count() == 0) kept = {};  // no elements: nothing to keep
  if (!has_shard_hop_) {
    Kept whole = std::move(kept);  // no piece of it is packed later
    const Contribution contribution = contribution_of(parameter, whole);
    const bool adds = buckets.count() > 0 && plan_->arithmetic(layout_, buckets.first).adds_carry;
    run(lock, [&] {
      packs_.wait(kNoSlot, whole.valid);
      if (contribution.accumulated.data != nullptr) packs_.wait_for_sums(kNoSlot);
      add_to_carries(parameter, contribution, adds);
      packs_.hold(kNoSlot, std::move(whole.owner));
    });
    for (int b = buckets.first; b < buckets.end; ++b) piece_packed(lock, {parameter, b});
    launch_complete(lock);
    wake_waiter();
    return;
  }
  pack_pieces(lock, parameter);
}

void Collector::pack_pieces(Lock& lock, int parameter) {
  const auto p = static_cast<std::size_t>(parameter);
  add_what_waits(lock, parameter);
  if (!open_) return;
  bool waits = false;
  std::vector<Piece> now;
  const BucketRun buckets = buckets_of(parameter);
  for (int b = buckets.first; b < buckets.end; ++b) {
    BucketState& state = states_[static_cast<std::size_t>(b)];
    if (state.slot >= 0) {
      now.push_back({parameter, b});
    } else {
      state.waiting.push_back(parameter);
      if (static_cast<int>(state.waiting.size()) == state.unpacked) fix_valid(lock, state);
      waits = true;
    }
  }
  if (waits) retain(kept_[p]);
  for (const Piece& piece : now) pack(lock, piece);
}

// The gradient is still in the cache now, and its memory becomes free for the next one.
void Collector::add_what_waits(Lock& lock, int parameter) {
  const auto p = static_cast<std::size_t>(parameter);
  if (accumulated_[p] == 0 || kept_[p].gradient.data == nullptr) return;
  // A narrower local sum would round here, and once more in the pack.
  const Dtype sums = memory_.accumulator(parameter).dtype;
  if (sums != sum_dtype(sums)) return;
  bool waits = false;
  const BucketRun buckets = buckets_of(parameter);
  for (int b = buckets.first; b < buckets.end; ++b) {
    waits |= states_[static_cast<std::size_t>(b)].slot < 0;
  }
  if (!waits) return;
  const Kept kept = kept_[p];
  add_locally(lock, parameter, kept.gradient, kept.owner, kept.valid);
  if (!open_) return;  // dropped meanwhile
  kept_[p].gradient = {};
  kept_[p].owner = {};
  kept_[p].valid = {};
}

void Collector::retain(Kept& kept) {
  if (kept.gradient.data == nullptr || kept.bytes > 0) return;
  kept.bytes = kept.gradient.count() * static_cast<std::int64_t>(size_bytes(kept.gradient.dtype));
  retained_bytes_ += kept.bytes;
  peak_retained_bytes_ = std::max(peak_retained_bytes_, retained_bytes_);
}

// By the time there is a slot, the stream may have much more work.
void Collector::fix_valid(Lock& lock, const BucketState& state) {
  if (packs_.on_host()) return;
  not_captured_.reset();
  run(lock, [&] {
    std::vector<ValidAfter> fixed;
    for (const int parameter : state.waiting) {
      ValidAfter& valid = kept_[static_cast<std::size_t>(parameter)].valid;
      if (valid.event || !valid.stream) continue;
      auto found = std::ranges::find_if(
          fixed, [&](const ValidAfter& one) { return one.stream->same_queue(*valid.stream); });
      if (found == fixed.end()) {
        fixed.push_back(valid);
        found = fixed.end() - 1;
        found->event = found->stream->record();
      }
      valid.event = found->event;
    }
  });
}

void Collector::pack(Lock& lock, Piece piece) {
  const auto p = static_cast<std::size_t>(piece.parameter);
  BucketState& state = states_[static_cast<std::size_t>(piece.bucket)];
  const int slot = state.slot;
  const TensorView staging = memory_.staging(slot, piece.bucket);
  const std::vector<BucketSegment>& segments = segments_[static_cast<std::size_t>(slot)];
  const int exponent = plan_->arithmetic(layout_, piece.bucket).row_exponent;
  Kept& kept = kept_[p];
  Kept own = kept.unpacked_pieces == 1 ? std::move(kept) : kept;
  const Contribution contribution = contribution_of(piece.parameter, own);
  const auto first =
      std::ranges::lower_bound(segments, piece.parameter, {}, &BucketSegment::parameter);
  run(lock, [&, free = state.slot_free] {
    packs_.wait(slot, free);
    packs_.wait(slot, own.valid);
    if (contribution.accumulated.data != nullptr) packs_.wait_for_sums(slot);
    for (auto i = first; i != segments.end() && i->parameter == piece.parameter; ++i) {
      pack_segment(contribution, *i, exponent, staging, packs_.queue(slot));
    }
    packs_.hold(slot, std::move(own.owner));
    if (!packs_.on_host()) state.slot_free = {};  // its stream has waited once and for all
  });
  piece_packed(lock, piece);
  launch_complete(lock);
  wake_waiter();
}

// A parameter is one run of the carry, or several if results are cut over the replicas.
void Collector::add_to_carries(int parameter, const Contribution& contribution, bool adds) {
  kernels::PackQueue& queue = packs_.queue(kNoSlot);
  if (layout_.shard_size() == 1) {
    return add_to_carry(contribution, adds, 0, memory_.slice_result(parameter), queue);
  }
  for (const CarryRun& run : carry_runs_[static_cast<std::size_t>(parameter)]) {
    const TensorView carry = memory_.bucket_carry(run.bucket).slice(run.bucket_offset, run.count);
    add_to_carry(contribution, adds, run.flat_offset, carry, queue);
  }
}

// `kept` is a copy of the caller: drop() may clear kept_ during a pack.
Contribution Collector::contribution_of(int parameter, const Kept& kept) const {
  const auto p = static_cast<std::size_t>(parameter);
  Contribution contribution;
  if (kept.gradient.data != nullptr) contribution.fresh = &kept.gradient;
  contribution.hole = kept.hole;
  if (accumulated_[p] != 0) contribution.accumulated = memory_.accumulator(parameter);
  return contribution;
}

void Collector::piece_packed(Lock& lock, Piece piece) {
  BucketState& state = states_[static_cast<std::size_t>(piece.bucket)];
  // Before any thread learns that all is packed.
  if (open_) launch_packs(lock, state.slot, state.unpacked == 1);
  if (!open_) return;  // dropped while the pack was in flight
  --state.unpacked;
  --unpacked_;
  Kept& kept = kept_[static_cast<std::size_t>(piece.parameter)];
  if (--kept.unpacked_pieces == 0) {
    retained_bytes_ -= kept.bytes;
    kept = {};
  }
}

void Collector::launch_complete(Lock& lock) {
  std::exception_ptr fault;
  while (open_ && next_launch_ < order_.size()) {
    const int number = order_[next_launch_];
    BucketState& state = states_[static_cast<std::size_t>(number)];
    const Bucket& bucket = layout_.buckets()[static_cast<std::size_t>(number)];
    const bool reduces = plan_->group(bucket.group).reduces();
    if (state.unpacked > 0 || (has_shard_hop_ && reduces && state.slot < 0)) break;
    ++next_launch_;
    if (reduces && state.slot >= 0) ++reducing_;
    Event packed;
    try {
      packed = packs_.record(state.slot);
    } catch (...) {
      fault = std::current_exception();
    }
    end_pack(state, packs_.on_host() ? OperationState::kDone : OperationState::kIssued);
    pipeline_.launch(number, reduces ? state.slot : kNoSlot, plan_, packed, state.phase);
  }
  if (fault) {  // last, as it may unlock
    run(lock, [&] { std::rethrow_exception(std::exchange(fault, nullptr)); });
  }
}

void Collector::slot_free(int slot, const Event& free) {
  const PackStreams::Farewell farewell(packs_);
  Lock lock(mutex_);
  free_slots_.emplace_back(slot, free);
  --reducing_;
  if (open_) assign_slots();
  wake_waiter();
  if (!leaves_packing_to_caller()) pack_ready(lock);
}

void Collector::assign_slots() {
  while (!free_slots_.empty() && next_slot_ < order_.size()) {
    const int number = order_[next_slot_];
    const Bucket& bucket = layout_.buckets()[static_cast<std::size_t>(number)];
    ++next_slot_;
    if (!plan_->group(bucket.group).reduces()) continue;
    BucketState& state = states_[static_cast<std::size_t>(number)];
    std::tie(state.slot, state.slot_free) = free_slots_.back();
    free_slots_.pop_back();
    segments_[static_cast<std::size_t>(state.slot)] = layout_.segments(number);
    // Not earlier: while a hop hangs, the rest of a backward pass would fill the record.
    if (!state.waiting.empty()) begin_pack(number);
    for (const int parameter : state.waiting) ready_.push_back({parameter, number});
    state.waiting.clear();
  }
}

void Collector::pack_ready(Lock& lock) {
  while (!ready_.empty()) {
    const Piece piece = ready_.front();
    ready_.pop_front();
    pack(lock, piece);
  }
}

bool Collector::leaves_packing_to_caller() const {
  return pack_order_ == PackOrder::kAhead && done_ != nullptr && reducing_ > 0;
}

// Waking the waiter in vain would cost a core, and this thread the lock.
void Collector::wake_waiter() {
  const bool for_done = done_ != nullptr && (*done_)();
  const bool for_help = leaves_packing_to_caller() && !ready_.empty();
  if (for_done || for_help) changed_.notify_all();
}

template <typename Pack>
void Collector::run(Lock& lock, const Pack& pack) {
  const bool unlocks = packs_.on_host();
  ++in_flight_;
  if (unlocks) lock.unlock();
  std::exception_ptr error;
  const double begin_s = Operations::now_s();
  const bool is_watched = profiler::is_watching();
  if (is_watched) profiler::push("hsdp:pack");
  try {
    pack();
  } catch (...) {
    error = std::current_exception();
  }
  if (is_watched) profiler::pop();
  operations_.add(OperationKind::kPack, Operations::now_s() - begin_s);
  if (error && !unlocks) lock.unlock();
  // After the handler: this thread must not hold a reference to the exception any more.
  const bool is_failure = error && !outcome_.note_fault(error);
  if (is_failure) outcome_.fail(std::move(error));
  if (!lock.owns_lock()) lock.lock();
  --in_flight_;
  if (awaits_quiet_ && in_flight_ == 0) changed_.notify_all();
}

void Collector::launch_packs(Lock& lock, int place, bool nothing_to_come) {
  if (packs_.on_host()) return;
  if (!nothing_to_come && !packs_.queue(place).is_full()) return;
  not_captured_.reset();
  run(lock, [&] { packs_.launch(place); });
}

void Collector::begin_pack(int bucket) {
  BucketState& state = states_[static_cast<std::size_t>(bucket)];
  if (state.operation) return;
  const auto bytes = static_cast<std::int64_t>(
      has_shard_hop_ ? memory_.staging(state.slot, bucket).size_in_bytes() : 0);
  state.operation = operations_.begin({.kind = OperationKind::kPack,
                                       .step = plan_->step,
                                       .microbatch = plan_->microbatch,
                                       .index = bucket,
                                       .bytes = bytes});
}

void Collector::end_pack(BucketState& state, OperationState how) {
  if (state.operation) operations_.end(*state.operation, how);
  state.operation.reset();
}

std::vector<int> Collector::missing() const {
  const std::scoped_lock lock(mutex_);
  std::vector<int> result;
  for (int p = 0; p < parameters_.size(); ++p) {
    if (arrived_[static_cast<std::size_t>(p)] == 0) result.push_back(p);
  }
  return result;
}

bool Collector::any_arrived() const {
  const std::scoped_lock lock(mutex_);
  return std::ranges::any_of(arrived_, [](std::int64_t count) { return count > 0; });
}

std::vector<std::int64_t> Collector::backward_counts(int group_count) const {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(group_count), 1);
  const std::scoped_lock lock(mutex_);
  for (int p = 0; p < parameters_.size(); ++p) {
    std::int64_t& count = counts[static_cast<std::size_t>(parameters_.group_of(p))];
    count = std::max(count, arrived_[static_cast<std::size_t>(p)]);
  }
  return counts;
}

void Collector::set_counts_of(std::shared_ptr<const MicrobatchPlan> plan) {
  const std::scoped_lock lock(mutex_);
  plan_ = std::move(plan);
}

void Collector::fill_holes() {
  const PackStreams::Farewell farewell(packs_);
  for (int parameter = 0; parameter < parameters_.size(); ++parameter) {
    const auto p = static_cast<std::size_t>(parameter);
    const GroupPlan& group = group_of(parameter);
    if (group.sync != Sync::kNone && !group.reduces()) continue;
    Lock lock(mutex_);
    const bool hole = arrived_[p] == 0 && plan_->fresh;
    if (group.sync == Sync::kNone) {
      if (!hole) continue;
      arrived_[p] = 1;
      run(lock, [&] { accumulate(parameter, {nullptr, {}, true}); });
      continue;
    }
    if (accepted_[p] != 0) continue;
    arrived_[p] = 1;
    if (kept_[p].gradient.data != nullptr) {  // it waited for the words
      accept(lock, parameter);
    } else {
      accept_sum(lock, parameter, hole || accumulated_[p] == 0);
    }
  }
  Lock lock(mutex_);
  run(lock, [&] { packs_.launch_all(); });
}

void Collector::pack_until(const std::function<bool()>& done) {
  const PackStreams::Farewell farewell(packs_);
  Lock lock(mutex_);
  const WaiterScope waiter(done_, done);
  std::optional<std::int64_t> operation;  // one for all waits of this call
  while (true) {
    pack_ready(lock);
    if (done()) break;
    if (!ready_.empty()) continue;
    const double begin_s = Operations::now_s();
    if (!operation) operation = operations_.begin({.kind = OperationKind::kWait}, begin_s);
    if (!issuer_) {
      changed_.wait(lock);
    } else if (changed_.wait_for(lock, IssueOrder::time_to_look()) == std::cv_status::timeout) {
      give_first(lock, done);
    }
    operations_.add(OperationKind::kWait, Operations::now_s() - begin_s);
  }
  if (operation) operations_.end(*operation, OperationState::kDone);
}

// Gives tasks to other lanes, while this thread waits for its buckets.
void Collector::give_first(Lock& lock, const Done& done) {
  const std::function<void()> give = issuer_->needed_first();
  if (!give || done()) return;
  lock.unlock();
  give();
  lock.lock();
}

// Called by a thread that hands gradients over, while it waits for another lane.
void Collector::give_next() {
  const PackStreams::Farewell farewell(packs_);
  Lock lock(mutex_);
  pack_ready(lock);
  // Late packs are sent after this rank's microbatch has ended.
  if (!open_ || plan_->packs_late) return;
  if (next_launch_ == order_.size()) return pipeline_.send_delayed();
  const int bucket = order_[next_launch_];
  std::vector<int> holes;
  for (int p = 0; p < parameters_.size(); ++p) {
    const BucketRun buckets = buckets_of(p);
    const bool is_here = buckets.first <= bucket && bucket < buckets.end;
    if (is_here && accepted_[static_cast<std::size_t>(p)] == 0) holes.push_back(p);
  }
  if (!holes_ && plan_->fresh && !holes.empty()) {
    const std::string more =
        holes.size() > 1 ? " and " + std::to_string(holes.size() - 1) + " more" : "";
    std::exception_ptr fault = std::make_exception_ptr(UsageError(
        {.where = "reducer: gradient of '" + parameters_.spec(holes.front()).name + "'" + more,
         .expected = "one before this rank waits for a later collective, as in the steps before",
         .got = "none yet",
         .remedy = "use missing=\"zero\" when parameters may go unused"}));
    outcome_.note_fault(fault);
    issuer_->distrust();
  }
  for (const int p : holes) {
    if (!open_) return;  // dropped meanwhile
    const auto place = static_cast<std::size_t>(p);
    early_holes_[place] = 1;
    accept_sum(lock, p, (arrived_[place] == 0 && plan_->fresh) || accumulated_[place] == 0);
  }
}

void Collector::end() {
  const std::scoped_lock lock(mutex_);
  open_ = false;
  packs_.leave_streams();
  issuer_open_.reset();
  for (int p = 0; p < parameters_.size(); ++p) {
    const GroupPlan& group = group_of(p);
    if (group.sync != Sync::kNone && group.reduces()) accumulated_[static_cast<std::size_t>(p)] = 0;
  }
}

std::vector<int> Collector::drop() {
  std::vector<int> unsent;
  Lock lock(mutex_);
  if (!open_) return unsent;
  open_ = false;
  issuer_open_.reset();
  ready_.clear();
  packs_.leave_streams();
  wait_for_packs_in_flight(lock);
  for (std::size_t i = next_launch_; i < order_.size(); ++i) {
    unsent.push_back(order_[i]);
    BucketState& state = states_[static_cast<std::size_t>(order_[i])];
    if (state.slot >= 0) free_slots_.emplace_back(state.slot, state.slot_free);
    end_pack(state, OperationState::kFailed);
    state = {};
  }
  std::vector<Kept> kept(kept_.size());
  kept.swap(kept_);
  const std::vector<GradientOwner> queued = packs_.forget();
  for (const Kept& one : kept) retained_bytes_ -= one.bytes;
  next_slot_ = next_launch_ = order_.size();
  lock.unlock();
  packs_.wait_idle();  // packs may read the gradients that are released next
  return unsent;
}

void Collector::wait_for_packs_in_flight(Lock& lock) {
  awaits_quiet_ = true;
  changed_.wait(lock, [&] { return in_flight_ == 0; });
  awaits_quiet_ = false;
}

void Collector::clear_accumulators() {
  const std::scoped_lock lock(mutex_);
  std::ranges::fill(accumulated_, 0);
}

bool Collector::is_open() const {
  const std::scoped_lock lock(mutex_);
  return open_;
}

Event Collector::packed() {
  const PackStreams::Farewell farewell(packs_);
  Lock lock(mutex_);
  Event packed;
  std::exception_ptr error;
  run(lock, [&] {
    try {
      packed = packs_.record_all();
    } catch (...) {
      error = std::current_exception();
      throw;
    }
  });
  if (error) std::rethrow_exception(error);
  return packed;
}

std::vector<Event> Collector::record_packs() {
  const std::scoped_lock lock(mutex_);
  return packs_.record_each();
}

void Collector::wait_for(const Event& event) {
  if (packs_.on_host()) return event.wait();
  const std::scoped_lock lock(mutex_);
  packs_.wait_on_all(event);
}

void Collector::notify() {
  const std::scoped_lock lock(mutex_);
  changed_.notify_all();
}

std::optional<TensorView> Collector::local_sum(int parameter) const {
  const std::scoped_lock lock(mutex_);
  if (accumulated_[static_cast<std::size_t>(parameter)] == 0) return std::nullopt;
  return memory_.accumulator(parameter);
}

std::string Collector::present() const {
  const std::scoped_lock lock(mutex_);
  return present_;
}

bool Collector::is_present(int parameter) const {
  const std::scoped_lock lock(mutex_);
  return present_.at(static_cast<std::size_t>(parameter)) == '1';
}

std::int64_t Collector::retained_bytes() const {
  const std::scoped_lock lock(mutex_);
  return retained_bytes_;
}

std::int64_t Collector::peak_retained_bytes() const {
  const std::scoped_lock lock(mutex_);
  return peak_retained_bytes_;
}

std::int64_t Collector::misaligned_bytes() const {
  const std::scoped_lock lock(mutex_);
  return packs_.misaligned_bytes();
}

}  // namespace hsdp::reducer
