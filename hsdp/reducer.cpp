#include "hsdp/reducer.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "hsdp/reducer/agreed_options.h"
#include "hsdp/reducer/compare_waits.h"
#include "hsdp/reducer/gradient_norm.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/plan_memory.h"
#include "hsdp/reducer/result_files.h"
#include "hsdp/reducer/results.h"
#include "hsdp/reducer/steps.h"
#include "hsdp/reducer/together.h"
#include "hsdp/reducer_internal.h"

namespace hsdp {

struct Reducer::Parts {
  Parts(reducer::Groups its_groups, reducer::AgreedOptions agreed)
      : groups(std::move(its_groups)),
        options(std::move(agreed.options)),
        parameters(options, groups.replicate.size()),
        steps(options, parameters, groups, memory),
        results(parameters, groups, steps, memory),
        files({options, parameters, groups, steps, results}, std::move(agreed.snapshot_id),
              memory) {
    shard_over(options.shard_over);
  }

  void shard_over(ShardOver over) {
    options.shard_over = over;
    groups.parts = over == ShardOver::kMesh ? groups.replicate.size() : 1;
    parameters.forget_layout();
  }

  // As parameters.find(); an unknown name is this rank's fault in the open microbatch.
  [[nodiscard]] int find_in_microbatch(std::string_view name) {
    try {
      return parameters.find(name);
    } catch (const UsageError& error) {
      steps.reject_gradient(error.what());
      throw;
    }
  }
  [[nodiscard]] std::optional<int> find_group(const std::optional<std::string>& group) const {
    return group ? std::optional(parameters.find_group(*group)) : std::nullopt;
  }

  MemoryCount memory;
  reducer::Groups groups;
  ReducerOptions options;
  reducer::ParameterTable parameters;
  reducer::Steps steps;
  reducer::Results results;
  reducer::ResultFiles files;
};

Reducer::Reducer(const Mesh& mesh, ReducerOptions options) {
  Communicator world = mesh.world();
  reducer::AgreedOptions agreed =
      reducer::agree_on_options(std::move(options), mesh.device(), world);
  const std::string title = reducer::title(agreed.options);
  parts_ = std::make_unique<Parts>(reducer::make_groups(mesh, title), std::move(agreed));
}
Reducer::~Reducer() = default;
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&&) noexcept = default;

int Reducer::register_parameter(const ParameterSpec& spec) {
  parts_->steps.check_usable("register_parameter");
  if (parts_->steps.frozen() != nullptr) {
    throw UsageError({.where = "reducer: register_parameter('" + spec.name + "')",
                      .expected = "all registrations before the first microbatch",
                      .got = "one after it",
                      .remedy = "make another Reducer for parameters that come later"});
  }
  return parts_->parameters.add(spec);
}

void Reducer::set_requires_gradient_sync(bool flag, const std::optional<std::string>& group) {
  reducer::StepLedger& ledger = parts_->steps.ledger_for("set_requires_gradient_sync");
  ledger.set_requires_gradient_sync(flag, parts_->find_group(group));
}
void Reducer::set_requires_all_reduce(bool flag, const std::optional<std::string>& group) {
  reducer::StepLedger& ledger = parts_->steps.ledger_for("set_requires_all_reduce");
  ledger.set_requires_all_reduce(flag, parts_->find_group(group));
}
void Reducer::set_partial_sync(Sync sync) {
  parts_->steps.ledger_for("set_partial_sync").set_partial_sync(sync);
}
void Reducer::set_gradient_divide_factor(std::optional<double> factor) {
  parts_->steps.ledger_for("set_gradient_divide_factor").set_gradient_divide_factor(factor);
}
void Reducer::set_loss_scale(double scale) {
  parts_->steps.ledger_for("set_loss_scale").set_loss_scale(scale);
}

void Reducer::divide_by_tokens(std::int64_t count) {
  parts_->steps.ledger_for("divide_by_tokens").divide_by_tokens(count);
}

void Reducer::set_stream(const Stream& stream) { parts_->steps.set_caller(stream); }
void Reducer::prepare() {
  parts_->steps.check_usable("prepare");
  parts_->steps.prepare();
}
void Reducer::begin_step() { parts_->steps.begin_step(); }
void Reducer::begin_microbatch(const MicrobatchOptions& options) {
  parts_->steps.begin_microbatch(options);
}
void Reducer::gradient_ready(std::string_view name, const StridedView& gradient,
                             std::shared_ptr<const void> keep_alive, const ValidAfter& valid) {
  gradient_ready(parts_->find_in_microbatch(name), gradient, std::move(keep_alive), valid);
}
void Reducer::gradient_ready(int parameter, StridedView gradient,
                             std::shared_ptr<const void> keep_alive, const ValidAfter& valid,
                             KeptUntil kept_until) {
  parts_->steps.gradient_ready(parameter, std::move(gradient), {std::move(keep_alive), kept_until},
                               valid);
}
Event Reducer::packed() {
  reducer::Frozen* const frozen = parts_->steps.frozen();
  return frozen != nullptr ? frozen->collector().packed() : Event();
}
void Reducer::reject_gradient(std::string_view message) { parts_->steps.reject_gradient(message); }
void Reducer::end_microbatch() { parts_->steps.end_microbatch(); }
void Reducer::begin_window(const WindowOptions& options) { parts_->steps.begin_window(options); }
void Reducer::end_window(std::int64_t backwards) { parts_->steps.end_window(backwards); }
std::vector<float> Reducer::local_sum(std::string_view name) {
  return parts_->results.local_sum(parts_->parameters.find(name));
}
void Reducer::local_sum(std::string_view name, TensorView out) {
  parts_->results.local_sum(parts_->parameters.find(name), out);
}
void Reducer::release_memory() { parts_->steps.release_memory(); }
void Reducer::abandon_step(std::string_view reason) noexcept { parts_->steps.abandon(reason); }
void Reducer::finish() { parts_->steps.finish(); }
void Reducer::discard() { parts_->steps.discard(); }
void Reducer::close() {
  parts_->steps.close();
  parts_->files.close();
}

std::vector<int> Reducer::unused_parameters(std::string_view call) {
  return parts_->results.unused_parameters(call);
}
TensorView Reducer::shard(std::string_view name) {
  return parts_->results.shard(parts_->parameters.find(name));
}
std::vector<float> Reducer::partial_shard(std::string_view name) {
  return parts_->results.partial_shard(parts_->parameters.find(name));
}
void Reducer::partial_shard(std::string_view name, TensorView out) {
  parts_->results.partial_shard(parts_->parameters.find(name), out);
}
Slice Reducer::slice(std::string_view name) {
  return parts_->results.slice(parts_->parameters.find(name));
}
const BucketLayout& Reducer::layout() { return parts_->results.layout(); }
const std::vector<ParameterSpec>& Reducer::parameters() const { return parts_->parameters.specs(); }

void Reducer::gather_gradients(std::span<const NamedArray> arrays) {
  parts_->results.gather_gradients(arrays);
}
void Reducer::gather_parameters(std::span<const NamedArray> arrays) {
  parts_->results.gather_parameters(arrays);
}

double Reducer::grad_norm() { return reducer::grad_norm(parts_->results); }
Event Reducer::grad_norm(TensorView out) { return reducer::grad_norm(parts_->results, out); }
double Reducer::clip_grad_norm(double max_norm) {
  Reducer* const self = this;
  return hsdp::clip_grad_norm({&self, 1}, max_norm);
}
bool Reducer::found_inf() { return parts_->results.found_inf(); }
Event Reducer::found_inf(TensorView out) { return parts_->results.found_inf(out); }

void Reducer::save_snapshot(const std::filesystem::path& path, std::int64_t step) {
  parts_->files.save_snapshot(path, step);
}
void Reducer::save_digest(const std::filesystem::path& folder, std::int64_t step) {
  parts_->files.save_digest(folder, step);
}
void Reducer::flush_snapshots() { parts_->files.flush(); }
void Reducer::add_party(std::weak_ptr<StepParty> party) {
  parts_->steps.add_party(std::move(party));
}
ReducerState Reducer::state() const { return parts_->steps.state(); }
Device Reducer::device() const { return parts_->groups.device; }
int Reducer::shard_rank() const { return parts_->groups.shard.rank(); }

ReducerStats Reducer::stats() const {
  ReducerStats s;
  const reducer::Steps& steps = parts_->steps;
  const reducer::Groups& groups = parts_->groups;
  const reducer::StepLedger::Counts counts = steps.ledger().counts();
  s.microbatch_count = counts.microbatches;
  s.step_count = counts.steps;
  s.begun_step_count = counts.begun_steps;
  s.all_gather_count = parts_->results.all_gather_count();
  s.control_links = groups.world.engine()->control().links();
  for (const ControlLinkStats& link : s.control_links) {
    s.control_message_count += link.sent_count;
    s.control_bytes += link.sent_bytes;
  }
  const CollectiveCounts shard_counts = groups.shard.stats();
  s.reduce_scatter_count = shard_counts[CollectiveKind::kReduceScatter].calls;
  s.shard_hop_bytes = shard_counts[CollectiveKind::kReduceScatter].bytes;
  s.pack_s = groups.operations.seconds(OperationKind::kPack);
  s.shard_hop_s = groups.operations.seconds(OperationKind::kShardHop);
  s.replica_hop_s = groups.operations.seconds(OperationKind::kReplicaHop);
  s.gather_s = groups.operations.seconds(OperationKind::kGather);
  s.update_s = groups.operations.seconds(OperationKind::kUpdate);
  s.waiting_s = groups.operations.seconds(OperationKind::kWait);
  s.engine = groups.world.engine_name();
  s.reduction = parts_->options.reduction;
  s.replica_hop = parts_->options.replica_hop->describe();
  s.shard_transport = name(groups.shard.transport());
  s.replica_transport = name(groups.replicate.transport());
  if (reducer::Frozen* const frozen = steps.frozen()) {
    s.bucket_count = static_cast<int>(std::ranges::count_if(
        frozen->layout().buckets(), [](const Bucket& bucket) { return bucket.count > 0; }));
    s.all_reduce_count = frozen->pipeline().replica_hop_count();
    s.replica_hop_bytes = frozen->replica_hop_bytes();
    s.misaligned_bytes = frozen->misaligned_bytes();
    s.retained_bytes = frozen->collector().retained_bytes();
    s.peak_retained_bytes = frozen->collector().peak_retained_bytes();
  }
  const MemoryCount& memory = parts_->memory;
  s.carry_bytes = memory.of(MemoryKind::kCarry).live;
  s.total_bytes = memory.of(MemoryKind::kTotal).live;
  s.staging_bytes = memory.of(MemoryKind::kStaging).live;
  s.accumulator_bytes = memory.of(MemoryKind::kLocalSums).live;
  s.replica_hop_state_bytes = memory.of(MemoryKind::kReplicaHop).live;
  s.snapshot_bytes = memory.of(MemoryKind::kSnapshot).live;
  s.optimizer_bytes = memory.of(MemoryKind::kOptimizer).live;
  s.parameter_gather_bytes = memory.of(MemoryKind::kParameterGather).live;
  s.scratch_bytes = memory.of(MemoryKind::kScratch).live;
  s.resident_bytes = memory.all().live;
  s.peak_resident_bytes = memory.all().peak;
  return s;
}

WaitTable Reducer::wait_table() {
  parts_->steps.check_usable("wait_table");
  parts_->steps.require_idle("wait_table");
  ReducerInternal(*this).wait_idle();
  return reducer::compare_waits(parts_->groups);
}

MemoryPlan Reducer::memory_plan(const MemoryUse& use) {
  const reducer::ParameterTable& parameters = parts_->parameters;
  if (parameters.size() == 0) {
    throw UsageError({.where = "reducer: memory_plan",
                      .expected = "registered parameters",
                      .got = "none",
                      .remedy = "attach a model or register parameters first"});
  }
  const ReducerOptions& options = parts_->options;
  MemoryUse its_use = use;
  const bool keeps_sums =
      options.backwards == Backwards::kMany || parts_->steps.ledger().partial_sync() == Sync::kNone;
  if (!use.local_sums && keeps_sums) its_use.local_sums = options.accumulate_dtype;
  const reducer::PlannedRank rank = reducer::planned_rank(parts_->groups);
  MemoryPlan plan = reducer::plan_memory(parameters, options, layout(), rank, its_use,
                                         reducer::plan_hop(parameters, options, layout(), rank));
  const MemoryCount& memory = parts_->memory;
  plan.optimizer_bytes = memory.of(MemoryKind::kOptimizer).live;
  plan.parameter_gather_bytes = memory.expected(MemoryKind::kParameterGather);
  if (parts_->steps.frozen() != nullptr) {
    plan.scratch_bytes = memory.of(MemoryKind::kScratch).live;  // with the engine's
  }
  plan.resident_bytes = plan.carry_bytes + plan.total_bytes + plan.staging_bytes +
                        plan.accumulator_bytes + plan.replica_hop_state_bytes +
                        plan.optimizer_bytes + plan.scratch_bytes;
  return plan;
}

// What several Reducers clip by, checked.
std::vector<reducer::Results*> Reducer::results_to_clip(std::span<Reducer* const> reducers,
                                                        double max_norm, std::string_view call) {
  const std::string where = "reducer: " + std::string(call);
  if (!(max_norm >= 0)) {
    throw UsageError(
        {.where = where, .expected = "a max_norm of at least 0", .got = std::to_string(max_norm)});
  }
  if (reducers.empty()) {
    throw UsageError(
        {.where = where, .expected = "Reducers", .got = "none", .remedy = "pass one or several"});
  }
  std::vector<reducer::Results*> all;
  for (std::size_t i = 0; i < reducers.size(); ++i) {
    if (reducers[i] != nullptr && std::ranges::count(reducers, reducers[i]) == 1) {
      all.push_back(&reducers[i]->parts_->results);
      continue;
    }
    const std::string what = reducers[i] == nullptr ? "none" : "one again";
    throw UsageError({.where = where,
                      .expected = "every Reducer once",
                      .got = what + " as number " + std::to_string(i)});
  }
  return all;
}

double clip_grad_norm(std::span<Reducer* const> reducers, double max_norm) {
  if (reducers.empty()) return 0.0;
  return reducer::clip_grad_norm(Reducer::results_to_clip(reducers, max_norm, "clip_grad_norm"),
                                 max_norm);
}

Event clip_grad_norm(std::span<Reducer* const> reducers, double max_norm, TensorView norm) {
  return reducer::clip_grad_norm(Reducer::results_to_clip(reducers, max_norm, "clip_grad_norm"),
                                 max_norm, norm);
}

Event clip_factor(std::span<Reducer* const> reducers, double max_norm, TensorView norm,
                  TensorView factor) {
  return reducer::clip_factor(Reducer::results_to_clip(reducers, max_norm, "clip_factor"), max_norm,
                              norm, factor, "clip_factor");
}

Step::Step(Reducer& reducer) : reducer_(reducer) { reducer.begin_step(); }

Step::~Step() {
  if (scope_.raised()) reducer_.abandon_step(reducer::ScopeEnd::kRaised);
}

Microbatch::Microbatch(Reducer& reducer, const MicrobatchOptions& options) : reducer_(&reducer) {
  reducer.begin_microbatch(options);
}

Microbatch::~Microbatch() {
  if (reducer_ == nullptr) return;
  reducer_->abandon_step(scope_.reason("its scope was left without end()"));
}

void Microbatch::end() {
  if (reducer_ == nullptr) {
    throw UsageError({.where = "reducer: microbatch",
                      .expected = "one end()",
                      .got = "another",
                      .remedy = "begin another Microbatch"});
  }
  std::exchange(reducer_, nullptr)->end_microbatch();
}

void ReducerInternal::set_units(std::span<const int> units) const {
  parts_.steps.check_usable("set_units");
  if (parts_.steps.frozen() != nullptr) {
    throw UsageError({.where = "reducer: set_units",
                      .expected = "units before the first microbatch",
                      .got = "them after it"});
  }
  parts_.parameters.set_units(units);
}

void ReducerInternal::set_shard_over(ShardOver over) const {
  parts_.steps.check_usable("set_shard_over");
  if (parts_.steps.frozen() != nullptr && over != parts_.options.shard_over) {
    throw UsageError({.where = "reducer: shard_over",
                      .expected = "\"" + std::string(word_of(parts_.options.shard_over)) +
                                  "\", as in the steps so far",
                      .got = "\"" + std::string(word_of(over)) + "\"",
                      .remedy = "say so when the Reducer is made"});
  }
  parts_.shard_over(over);
}
void ReducerInternal::together(std::string_view what, const std::function<void()>& part) const {
  reducer::together(parts_.groups.world, what, part);
}
std::unique_ptr<GatherLane> ReducerInternal::make_lane(const std::string& name,
                                                       const LanePreparation& prepare) const {
  reducer::Steps& steps = parts_.steps;
  std::vector<std::string> lines;
  reducer::together(parts_.groups.world, "make lane '" + name + "'", [&] {
    steps.check_usable("make_lane");
    steps.require_idle("make_lane");
    if (prepare) lines = prepare();
  });
  return std::unique_ptr<GatherLane>(new GatherLane(parts_.groups, name, lines, steps.frozen()));
}
MemoryCount ReducerInternal::memory_count() const { return parts_.memory; }
reducer::Groups& ReducerInternal::groups() const { return parts_.groups; }
void ReducerInternal::wait_idle() const {
  if (reducer::Frozen* const frozen = parts_.steps.frozen()) frozen->pipeline().wait_idle();
}
void ReducerInternal::require_idle(std::string_view call) const {
  if (parts_.steps.ledger().phase() != reducer::StepLedger::Phase::kClosed)
    parts_.steps.require_idle(call);
}
const Operations& ReducerInternal::operations() const { return parts_.groups.operations; }
bool ReducerInternal::has_gradient(int parameter) const {
  return parts_.steps.has_gradient(parameter);
}
void ReducerInternal::check_window() const { parts_.steps.check_window(); }
void ReducerInternal::leave_window(std::string_view reason) const noexcept {
  parts_.steps.leave_window(reason);
}
std::optional<StepAbortedError> ReducerInternal::take_drop() const {
  return parts_.steps.take_drop();
}
int ReducerInternal::slice_parts() const { return parts_.groups.parts; }
Slice ReducerInternal::shard_slice(std::string_view name) const {
  return parts_.results.shard_slice(parts_.parameters.find(name));
}
std::int64_t ReducerInternal::verify_every() const { return parts_.options.verify_every; }

}  // namespace hsdp
