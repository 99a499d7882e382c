#include "hsdp/row_reducer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/flag.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/reducer/agreed_options.h"
#include "hsdp/reducer/compare_lines.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/hop_owner.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/step_agreement.h"
#include "hsdp/reducer/together.h"

namespace hsdp {
namespace {

using reducer::StatusWord;
using reducer::StepAgreement;

constexpr std::string_view kGradients = "gradients";
constexpr std::string_view kTotal = "total";

std::vector<std::string> model_lines(const std::vector<RowGroup>& groups) {
  std::vector<std::string> lines;
  for (const RowGroup& group : groups) {
    lines.push_back(group.name + " sends " + std::string(name(group.wire)));
    for (const HopParameter& parameter : group.parameters) {
      lines.push_back(parameter.name + " " + to_string(parameter.shape) + " " +
                      std::string(name(parameter.dtype)));
    }
  }
  return lines;
}

void compare_models(const std::vector<RowGroup>& groups, const ReplicaHop& hop,
                    Communicator& world) {
  std::vector<std::string> lines;
  reducer::together(world, "describe its model and hop", [&] {
    const std::string description = hop.describe();
    reducer::check_description(description);
    lines = model_lines(groups);
    lines.push_back("the hop " + description + " sends " +
                    (hop.wire() ? std::string(name(*hop.wire())) : "the dtype of the rows"));
  });
  const auto difference = reducer::compare_lines(world, lines, "registration");
  if (!difference) return;
  const std::string rank = comm::ranks_text({difference->rank}, world.size());
  throw MismatchError(
      {.where = "replica_hook: model",
       .expected = "the same on all ranks",
       .got = difference->got + " (" + rank + ") and " + difference->expected + " on rank 0",
       .remedy = "shard the same model in the same way everywhere, and give it the same hop"},
      {world.world_rank(difference->rank)});
}

reducer::WordNames word_names(const std::vector<RowGroup>& groups) {
  reducer::WordNames names;
  names.component = "replica_hook";
  names.microbatch = "backward";
  names.remedy =
      "call set_requires_all_reduce with the same flags once before each backward, and finish() "
      "after the last, on all ranks";
  for (const RowGroup& group : groups) names.groups.push_back(group.name);
  return names;
}

StridedView flat(const TensorView& view) {
  return {view.data, view.dtype, view.device, {view.count}, {}};
}

// out = (kept +) row in fp32; each may be missing.
void sum(const TensorView& kept, const TensorView& row, const TensorView& out,
         const Stream& stream) {
  if (kept.data == nullptr && row.data == out.data && row.data != nullptr) return;
  const StridedView first = flat(kept.data != nullptr ? kept : row);
  kernels::CastAndPack args;
  if (first.data != nullptr) args.gradient = &first;
  if (kept.data != nullptr && row.data != nullptr) {
    args.add = row.data;
    args.add_dtype = row.dtype;
  }
  args.count = out.count;
  args.out = out.data;
  kernels::cast_and_pack(args, stream);
}

// Says in each word which parameters are in the rows, which change where some are frozen.
class RowContent final : public StepParty {
 public:
  [[nodiscard]] std::string owner() const override { return "the trainable parameters"; }
  [[nodiscard]] std::string word() const override { return digest_; }
  [[nodiscard]] bool has_state() const override { return false; }
  void set(const std::vector<RowGroup>& groups) {
    digest_ = std::to_string(reducer::digest_of(model_lines(groups)));
  }

 private:
  std::string digest_;
};

}  // namespace

struct RowReducer::Parts {
  struct Group {
    RowGroup of;
    bool all_reduce = true;
    Buffer sum;                  // fp32, of `row_count` rows of this step
    Event written;               // the sum, on whatever stream
    std::int64_t row_count = 0;  // kept
    std::int64_t most_rows = 0;  // of any rank, with this backward's, once agreed
    std::optional<bool> means;   // of the hop in this step
  };
  // In a backward: kAgreed once all ranks know that it goes over the replicas.
  enum class Backward : std::uint8_t { kNothingReduced, kAgreed, kOver };
  struct Posted {
    std::int64_t number = 0;
    std::int64_t step = 0;
  };

  Parts(reducer::Groups its_ranks, std::vector<RowGroup> its_groups,
        std::shared_ptr<ReplicaHop> its_hop)
      : ranks(std::move(its_ranks)),
        hop(std::move(its_hop)),
        outcome(ranks.world),
        agreement(ranks.world, ranks.world.next_exchange_key(), word_names(its_groups)),
        nonfinite(make_flag(ranks.device)) {
    content->set(its_groups);
    for (RowGroup& group : its_groups) groups.push_back({.of = std::move(group)});
  }
  ~Parts();
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  [[nodiscard]] bool is_alone() const { return ranks.replicate.size() == 1; }
  [[nodiscard]] bool begun() const { return call_count > 0 || row_count > 0; }
  [[nodiscard]] bool is_complete() const;  // its last backward is over, and nothing is left
  [[nodiscard]] Group& group(int number);
  [[nodiscard]] HopPlan hop_plan() const;
  void check(const Group& group, std::string_view what, const TensorView& values) const;

  void close_backward(std::string_view call);
  void agree();
  void over_replicas(int number, const Row& row, const TensorView& total, Stream& stream);
  [[nodiscard]] StatusWord word_of(const char* call) const;
  [[nodiscard]] Posted post(StatusWord word);
  void judge(const Posted& posted);
  void prepare_hop();
  void judge_own_drop();
  // A rank has not ended the step before that one, and will not any more.
  [[nodiscard]] bool is_behind(const StepAgreement::Words& words, std::int64_t step) const;
  void settle(std::int64_t step);
  void end_step(const StepEnd& end);
  void wait_for_sums();
  [[nodiscard]] bool take_nonfinite();
  void let_go_of_hop(const std::string& cause) noexcept;
  void abandon(std::string_view reason) noexcept;
  void drop(std::string_view reason);
  void next_step();

  reducer::Groups ranks;
  std::vector<Group> groups;
  std::shared_ptr<ReplicaHop> hop;
  reducer::Outcome outcome;
  StepAgreement agreement;
  std::optional<reducer::HopOwner> owner;  // where there are several replicas
  std::shared_ptr<RowContent> content = std::make_shared<RowContent>();
  bool must_prepare = false;  // the hop, for other parameters
  Flag nonfinite;
  Event reduced;            // what was enqueued so far
  std::vector<Event> late;  // of the hop, to be asked for their errors on a GPU
  std::int64_t reduce_count = 0;

  std::int64_t step = 0;
  std::int64_t call_count = 0;  // of set_requires_all_reduce in this step
  std::int64_t row_count = 0;   // in this step
  Backward backward = Backward::kNothingReduced;
  std::optional<Posted> own_drop;  // not judged yet
};

RowReducer::Parts::~Parts() {
  constexpr auto kWhy = "the hooks were taken out";
  agreement.stop_waiting();
  if (!own_drop) abandon(kWhy);
  try {
    wait_for_sums();
  } catch (...) {
    outcome.fail(std::current_exception());
  }
  let_go_of_hop(kWhy);
}

// Whose steps end first, and which uses nothing any more then.
void RowReducer::Parts::let_go_of_hop(const std::string& cause) noexcept {
  try {
    if (owner) agreement.end_cut_steps(step, cause);
  } catch (...) {
    outcome.fail(std::current_exception());
  }
  owner.reset();
}

RowReducer::Parts::Group& RowReducer::Parts::group(int number) {
  if (number >= 0 && number < std::ssize(groups)) return groups[static_cast<std::size_t>(number)];
  throw UsageError({.where = "replica_hook",
                    .expected = "a group below " + std::to_string(groups.size()),
                    .got = std::to_string(number)});
}

bool RowReducer::Parts::is_complete() const {
  return backward == Backward::kOver && std::ranges::all_of(groups, [](const Group& group) {
           return group.all_reduce && group.row_count == 0;
         });
}

HopPlan RowReducer::Parts::hop_plan() const {
  HopPlan plan;
  for (const Group& group : groups) {
    const int base = static_cast<int>(plan.parameters.size());
    plan.parameters.insert(plan.parameters.end(), group.of.parameters.begin(),
                           group.of.parameters.end());
    std::vector<ParameterRange>& ranges = plan.ranges.emplace_back(group.of.ranges);
    for (ParameterRange& range : ranges) range.parameter += base;
    plan.wires.push_back(group.of.wire);
  }
  plan.replicate_size = ranks.replicate.size();
  plan.device = ranks.device;
  return plan;
}

void RowReducer::Parts::check(const Group& group, std::string_view what,
                              const TensorView& values) const {
  const auto refuse = [&](const std::string& expected, const std::string& got,
                          const std::string& remedy = {}) {
    const std::string where = "replica_hook: " + std::string(what) + " of " + group.of.name;
    throw UsageError({.where = where, .expected = expected, .got = got, .remedy = remedy});
  };
  if (values.count != group.of.count) {
    refuse(std::to_string(group.of.count) + " elements", std::to_string(values.count));
  }
  const bool is_total = what == kTotal;
  if (is_total ? values.dtype != Dtype::kF32 : !is_gradient_dtype(values.dtype)) {
    refuse(is_total ? "f32" : "f32, bf16 or f16", std::string(name(values.dtype)));
  }
  if (!(values.device == ranks.device)) {
    refuse("memory on " + to_string(ranks.device), to_string(values.device),
           "make the mesh for the model's device");
  }
}

// What comes next is another backward, or another step.
void RowReducer::Parts::close_backward(std::string_view call) {
  if (backward == Backward::kAgreed && !is_alone()) {
    outcome.fail(std::make_exception_ptr(
        Error({.where = "replica_hook: " + std::string(call),
               .expected = "the end of a backward that reduces over the replicas",
               .got = "one that an error has left"})));
    outcome.rethrow_failure(call);
  }
  if (backward == Backward::kNothingReduced) return;
  if (std::ranges::all_of(groups, &Group::all_reduce)) {
    std::string kept;
    for (const Group& group : groups) {
      if (group.row_count > 0) kept += (kept.empty() ? "" : ", ") + group.of.name;
    }
    if (!kept.empty()) {
      throw UsageError({.where = "replica_hook",
                        .expected = "no gradients left over from the last step",
                        .got = "those of " + kept + ", which did not run in its last backward",
                        .remedy = "call handle.finish() before optimizer.step()"});
    }
    next_step();
  }
  backward = Backward::kNothingReduced;
}

// Before anything is summed, all ranks must be in the same backward of the same step: ranks that
// count differently would add sums of different microbatches.
void RowReducer::Parts::agree() {
  if (backward == Backward::kAgreed) return;
  if (!is_alone()) judge(post(word_of(reducer::kBackwardCall)));
  backward = Backward::kAgreed;
}

StatusWord RowReducer::Parts::word_of(const char* call) const {
  const bool finishes = call == reducer::kFinishCall;
  StatusWord word;
  word.call = call;
  word.step = step;
  word.microbatch = call_count;
  for (const Group& group : groups) {
    word.groups.push_back({.sync = finishes || group.all_reduce ? Sync::kAll : Sync::kShard,
                           .carry_count = finishes ? group.row_count : group.row_count + 1});
  }
  return word;
}

// Who cannot say its word drops the step.
RowReducer::Parts::Posted RowReducer::Parts::post(StatusWord word) {
  judge_own_drop();
  word.step = step;  // which that may have changed
  if (!word.dropped) {
    try {
      word.sections = agreement.sections();
    } catch (const std::exception& error) {
      drop(error.what());
      throw;
    }
  }
  if (agreement.ended_steps() < step) agreement.post_nonfinite(step - 1, take_nonfinite());
  return {agreement.post(word), step};
}

// Throws where the ranks do not agree, or one has dropped the step: nobody has it any more then.
void RowReducer::Parts::judge(const Posted& posted) {
  const StepAgreement::Words words = agreement.collect(posted.number);
  const bool last_is_cut = is_behind(words, posted.step);
  if (!last_is_cut) settle(posted.step - 1);
  StepAgreement::Judgement judgement = agreement.judge(words);
  if (!judgement.mismatch && !judgement.dropped) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      groups[g].most_rows = 0;
      for (const StatusWord& word : words) {
        groups[g].most_rows = std::max(groups[g].most_rows, word.groups[g].carry_count);
      }
    }
    return prepare_hop();
  }
  const std::string cause =
      judgement.mismatch ? judgement.mismatch->message : std::move(judgement.cause);
  static_cast<void>(take_nonfinite());
  if (last_is_cut) --step;
  end_step({step, StepOutcome::kDropped, cause});
  next_step();
  if (judgement.mismatch) comm::throw_failure(*judgement.mismatch);
  reducer::throw_drop(std::move(*judgement.drop));
}

// Now that the last step has ended for it.
void RowReducer::Parts::prepare_hop() {
  if (!std::exchange(must_prepare, false)) return;
  outcome.guard(step, [&] { owner->prepare(hop_plan()); });
  outcome.rethrow_failure("replica hop");
}

// The others may be long in backwards that send nothing.
void RowReducer::Parts::judge_own_drop() {
  if (!own_drop) return;
  const auto words = agreement.collect_patiently(own_drop->number);
  if (!words) return;
  if (is_behind(*words, own_drop->step)) {
    --own_drop->step;
    --step;
  } else {
    settle(own_drop->step - 1);
  }
  static_cast<void>(take_nonfinite());
  end_step({own_drop->step, StepOutcome::kDropped, agreement.judge(*words).cause});
  own_drop.reset();
}

bool RowReducer::Parts::is_behind(const StepAgreement::Words& words, std::int64_t of_step) const {
  return agreement.ended_steps() < of_step &&
         std::ranges::any_of(words, [&](const StatusWord& word) { return word.step < of_step; });
}

// The last word of a step is how it came out, which comes with the first of the next.
void RowReducer::Parts::settle(std::int64_t of_step) {
  if (agreement.ended_steps() > of_step) return;
  const bool overflow = agreement.collect_nonfinite(of_step);
  end_step({of_step, overflow ? StepOutcome::kOverflow : StepOutcome::kClean, {}});
}

void RowReducer::Parts::end_step(const StepEnd& end) {
  outcome.guard(end.step, [&] { agreement.end_step(end); });
  outcome.rethrow_failure("end of a step");
}

// The memory of what is kept is in use until then.
void RowReducer::Parts::wait_for_sums() {
  outcome.guard(step, [&] {
    ranks.world.wait(reduced);
    for (const Event& event : std::exchange(late, {})) ranks.world.wait(event);
    for (const Group& group : groups) ranks.world.wait(group.written);
  });
  outcome.rethrow_failure("replica hop");
}

// Whether a sum was not finite since it was last asked.
bool RowReducer::Parts::take_nonfinite() {
  wait_for_sums();
  return nonfinite->exchange(0) != 0;
}

void RowReducer::Parts::abandon(std::string_view reason) noexcept {
  if (!begun()) return;
  try {
    outcome.rethrow_failure("abandon_step");
    if (backward == Backward::kAgreed && !is_alone()) {
      throw Error("replica_hook: a backward that reduces over the replicas was left: " +
                  std::string(reason));
    }
    drop(reason);
  } catch (...) {
    outcome.fail(std::current_exception());
    next_step();
  }
}

void RowReducer::Parts::drop(std::string_view reason) {
  if (is_alone()) return next_step();
  StatusWord word = word_of(reducer::kDropCall);
  word.groups.clear();
  word.dropped = true;
  word.reason = reason.empty() ? "no reason was given" : reason;
  own_drop = post(std::move(word));
  next_step();
}

// Nothing is kept of the one before.
void RowReducer::Parts::next_step() {
  for (Group& group : groups) {
    group.row_count = 0;
    group.means.reset();
  }
  ++step;
  call_count = row_count = 0;
  backward = Backward::kNothingReduced;
}

void RowReducer::Parts::over_replicas(int number, const Row& row, const TensorView& total,
                                      Stream& stream) {
  Group& rows = group(number);
  if (!rows.means) rows.means = hop->means(number);
  const auto replicas = ranks.replicate.size();
  HopBucket bucket;
  bucket.bucket = number;
  bucket.data = total;
  bucket.arithmetic = hop_arithmetic({.shard_size = row.shard_size,
                                      .replicate_size = replicas,
                                      .replica_wire = hop->wire().value_or(rows.of.wire),
                                      .carry_count = std::max(rows.most_rows, call_count),
                                      .replicates = true,
                                      .ends_step = true,
                                      .divisor = static_cast<float>(replicas),
                                      .means = *rows.means})
                          .replica;
  bucket.nonfinite = nonfinite.get();
  const Event done = hop->reduce(bucket, stream);
  if (ranks.on_host() || done.complete()) {
    done.wait();
  } else {
    late.push_back(done);
  }
  stream.wait(done);
  ++reduce_count;
}

RowReducer::RowReducer(const Mesh& mesh, std::vector<RowGroup> groups,
                       std::shared_ptr<ReplicaHop> hop) {
  if (!hop) hop = std::make_shared<PlainHop>();
  Communicator world = mesh.world();
  compare_models(groups, *hop, world);
  parts_ = std::make_unique<Parts>(reducer::make_groups(mesh), std::move(groups), std::move(hop));
  if (parts_->is_alone()) return;
  parts_->owner.emplace(parts_->ranks, parts_->hop, [this] { return parts_->hop_plan(); });
  parts_->agreement.add_party(parts_->hop, 0);
  parts_->agreement.add_party(parts_->content, 0);
}

RowReducer::~RowReducer() = default;
RowReducer::RowReducer(RowReducer&&) noexcept = default;
RowReducer& RowReducer::operator=(RowReducer&&) noexcept = default;

void RowReducer::set_groups(std::vector<RowGroup> groups) {
  parts_->outcome.rethrow_failure("set_groups");
  if (parts_->is_complete()) parts_->close_backward("set_groups");
  if (parts_->row_count > 0 || groups.size() != parts_->groups.size()) {
    throw UsageError({.where = "replica_hook",
                      .expected = "other parameters before the first row of a step and in the "
                                  "same modules",
                      .got = "them later, or other modules",
                      .remedy = "freeze parameters between steps only"});
  }
  parts_->wait_for_sums();
  parts_->content->set(groups);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].count != parts_->groups[g].of.count) parts_->groups[g].sum = {};
    std::swap(parts_->groups[g].of, groups[g]);
  }
  parts_->must_prepare = parts_->owner.has_value();
}

bool RowReducer::begins_step() const { return parts_->row_count == 0 || parts_->is_complete(); }

void RowReducer::set_requires_all_reduce(bool flag, std::span<const int> groups) {
  parts_->outcome.rethrow_failure("set_requires_all_reduce");
  parts_->close_backward("set_requires_all_reduce");
  for (const int number : groups) parts_->group(number).all_reduce = flag;
  ++parts_->call_count;
}

void RowReducer::close() {
  parts_->abandon("the hooks were taken out");
  parts_->let_go_of_hop("the hooks were taken out");
}

bool RowReducer::requires_all_reduce(int group) const { return parts_->group(group).all_reduce; }

void RowReducer::keep(int group, const Row& row, const Stream& stream) {
  parts_->outcome.rethrow_failure("keep");
  Parts::Group& rows = parts_->group(group);
  parts_->check(rows, kGradients, row.values);
  Stream on = stream;
  if (parts_->ranks.on_host()) on.synchronize();
  const auto bytes = static_cast<std::size_t>(rows.of.count) * sizeof(float);
  if (rows.sum.size() != bytes) rows.sum = Buffer(parts_->ranks.device, bytes);
  const TensorView kept = rows.sum.view(Dtype::kF32);
  on.wait(rows.written);
  sum(rows.row_count > 0 ? kept : TensorView{}, row.values, kept, on);
  rows.written = on.record();
  ++rows.row_count;
  ++parts_->row_count;
}

void RowReducer::reduce(int group, const Row& row, TensorView total, Stream& stream) {
  parts_->outcome.rethrow_failure("reduce");
  if (parts_->backward == Parts::Backward::kOver) parts_->close_backward("reduce");
  Parts::Group& rows = parts_->group(group);
  ++parts_->row_count;
  try {
    if (row.values.data != nullptr) parts_->check(rows, kGradients, row.values);
    parts_->check(rows, kTotal, total);
  } catch (const UsageError& error) {
    reject(error.what());
    throw;
  }
  parts_->agree();
  std::exception_ptr error;
  try {
    if (parts_->ranks.on_host()) stream.synchronize();
    stream.wait(parts_->reduced);  // one after the other, whatever streams they come on
    stream.wait(rows.written);
    sum(rows.row_count > 0 ? rows.sum.view(Dtype::kF32) : TensorView{}, row.values, total, stream);
    rows.row_count = 0;
    if (!parts_->is_alone()) parts_->over_replicas(group, row, total, stream);
    parts_->reduced = rows.written = stream.record();
    if (parts_->reduced.complete()) parts_->reduced.wait();  // throws what went wrong
    return;
  } catch (...) {
    error = std::current_exception();
  }
  if (parts_->is_alone()) std::rethrow_exception(error);
  parts_->outcome.fail(error);
  parts_->next_step();
  parts_->let_go_of_hop(reducer::text_of(error));  // which may be using the total
  parts_->outcome.rethrow_failure("reduce");
}

void RowReducer::reject(std::string_view message) {
  if (parts_->is_alone()) return;
  if (parts_->backward == Parts::Backward::kAgreed) {
    parts_->outcome.fail(std::make_exception_ptr(UsageError(std::string(message))));
    return;
  }
  if (parts_->is_complete()) parts_->next_step();
  ++parts_->row_count;  // it begins the step
  abandon_step(message);
}

void RowReducer::end_backward() {
  if (parts_->backward == Parts::Backward::kAgreed) parts_->backward = Parts::Backward::kOver;
}

std::vector<int> RowReducer::begin_finish() {
  parts_->outcome.rethrow_failure("finish");
  if (parts_->backward == Parts::Backward::kAgreed && !parts_->is_alone()) {
    parts_->close_backward("finish");
  }
  for (Parts::Group& group : parts_->groups) group.most_rows = group.row_count;
  if (!parts_->is_alone()) parts_->judge(parts_->post(parts_->word_of(reducer::kFinishCall)));
  parts_->backward = Parts::Backward::kAgreed;
  std::vector<int> left;
  for (std::size_t g = 0; g < parts_->groups.size(); ++g) {
    if (parts_->groups[g].most_rows > 0) left.push_back(static_cast<int>(g));
  }
  return left;
}

void RowReducer::end_finish() {
  parts_->outcome.rethrow_failure("finish");
  parts_->backward = Parts::Backward::kNothingReduced;
  if (!parts_->begun()) return;
  const std::int64_t step = parts_->step;
  parts_->next_step();
  if (parts_->is_alone()) return;
  parts_->agreement.post_nonfinite(step, parts_->take_nonfinite());
  parts_->settle(step);
}

void RowReducer::abandon_step(std::string_view reason) noexcept { parts_->abandon(reason); }

bool RowReducer::keeps(int group) const { return parts_->group(group).row_count > 0; }

std::int64_t RowReducer::kept_bytes() const {
  std::int64_t bytes = 0;
  for (const Parts::Group& group : parts_->groups) {
    if (group.row_count > 0) bytes += static_cast<std::int64_t>(group.sum.size());
  }
  return bytes;
}

std::int64_t RowReducer::all_reduce_count() const { return parts_->reduce_count; }

}  // namespace hsdp
