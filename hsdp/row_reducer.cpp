#include "hsdp/row_reducer.h"

#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/reducer/agreed_options.h"
#include "hsdp/reducer/compare_lines.h"
#include "hsdp/reducer/flight_watch.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/hop_owner.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/row_check.h"
#include "hsdp/reducer/row_steps.h"
#include "hsdp/reducer/row_sums.h"
#include "hsdp/reducer/together.h"

namespace hsdp {
namespace {

constexpr std::string_view kGradients = "gradients";
constexpr std::string_view kTotal = "total";
constexpr auto kTakenOut = "the hooks were taken out";

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

std::vector<std::string> group_names(const std::vector<RowGroup>& groups) {
  std::vector<std::string> names;
  names.reserve(groups.size());
  for (const RowGroup& group : groups) names.push_back(group.name);
  return names;
}

void compare_models(const std::vector<RowGroup>& groups, const ReplicaHop& hop,
                    std::int64_t verify_every, Communicator& world) {
  std::vector<std::string> lines;
  reducer::together(world, "describe its model and hop", [&] {
    if (verify_every < 0) {
      throw UsageError({.where = "replica_hook",
                        .expected = "verify_every of at least 1, or 0 for no step",
                        .got = std::to_string(verify_every)});
    }
    const std::string description = hop.describe();
    reducer::check_description(description);
    lines = model_lines(groups);
    lines.push_back("the hop " + description + " sends " +
                    (hop.wire() ? std::string(name(*hop.wire())) : "the dtype of the rows"));
    lines.push_back("verify_every " + std::to_string(verify_every));
  });
  const auto difference = reducer::compare_lines(world, lines, "compare its model and hop");
  if (!difference) return;
  const std::string rank = comm::ranks_text({difference->rank}, world.size());
  throw MismatchError(
      {.where = "replica_hook: model",
       .expected = difference->expected + " on every rank",
       .got = difference->got + " on " + rank,
       .remedy = "shard the same model in the same way on every rank, and give it the same hop"},
      {world.world_rank(difference->rank)});
}

// Says in each word which parameters are in the rows, which change where some are frozen.
class RowContent final : public StepParty {
 public:
  [[nodiscard]] std::string owner() const override { return "trainable parameters"; }
  [[nodiscard]] std::string word() const override { return digest_; }
  [[nodiscard]] bool has_state() const override { return false; }
  void set(const std::vector<RowGroup>& groups) {
    std::size_t count = 0;
    for (const RowGroup& group : groups) count += group.parameters.size();
    std::array<char, 32> digest{};
    constexpr std::uint64_t kMask = (std::uint64_t{1} << 48) - 1;  // a word is short
    std::snprintf(digest.data(), digest.size(), " #%012" PRIx64,
                  reducer::digest_of(model_lines(groups)) & kMask);
    digest_ = std::to_string(count) + digest.data();
  }

 private:
  std::string digest_;
};

}  // namespace

struct RowReducer::Parts {
  struct Group {
    RowGroup of;
    bool means = false;  // of the hop, in that step
    std::int64_t means_step = -1;
  };

  Parts(reducer::Groups its_ranks, std::vector<RowGroup> its_groups,
        std::shared_ptr<ReplicaHop> its_hop, std::int64_t verify_every)
      : ranks(std::move(its_ranks)),
        hop(std::move(its_hop)),
        outcome(ranks.world),
        sums(ranks, its_groups.size(), outcome),
        check(verify_every, ranks),
        steps(ranks, group_names(its_groups), outcome, sums, check,
              [this] { return owner ? &*owner : nullptr; }) {
    content->set(its_groups);
    for (RowGroup& group : its_groups) groups.push_back({.of = std::move(group)});
  }
  ~Parts() { close(); }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  [[nodiscard]] bool is_alone() const { return ranks.replicate.size() == 1; }
  [[nodiscard]] Group& group(int number) { return groups[steps.index(number)]; }
  [[nodiscard]] HopPlan hop_plan() const;
  void require_fits(const RowGroup& group, std::string_view what, const TensorView& values) const;
  [[nodiscard]] std::vector<reducer::RowCheck::Run> runs() const;
  void prepare_hop();
  void add_up(int number, const Row& row, const TensorView& total, Stream& stream);
  void over_replicas(int number, const Row& row, const TensorView& total, Stream& stream);
  void let_go_of_hop(const std::string& cause) noexcept;
  void close() noexcept;

  reducer::Groups ranks;
  std::vector<Group> groups;
  std::shared_ptr<ReplicaHop> hop;
  reducer::Outcome outcome;
  reducer::RowSums sums;
  reducer::RowCheck check;
  reducer::RowSteps steps;
  std::optional<reducer::HopOwner> owner;  // where there are several replicas
  std::shared_ptr<RowContent> content = std::make_shared<RowContent>();
  std::string prepared;  // the content that the hop is prepared for
  std::int64_t reduce_count = 0;
};

void RowReducer::Parts::close() noexcept {
  steps.close(kTakenOut);
  sums.drain();
  let_go_of_hop(kTakenOut);
}

// Whose steps end first, and which uses nothing any more then.
void RowReducer::Parts::let_go_of_hop(const std::string& cause) noexcept {
  try {
    if (owner) steps.end_cut_steps(cause);
  } catch (...) {
    outcome.fail(std::current_exception());
  }
  owner.reset();
}

HopPlan RowReducer::Parts::hop_plan() const {
  HopPlan plan;
  for (const Group& group : groups) {
    const int base = static_cast<int>(plan.parameters.size());
    plan.parameters.insert(plan.parameters.end(), group.of.parameters.begin(),
                           group.of.parameters.end());
    std::vector<ParameterRange>& ranges = plan.ranges.emplace_back(group.of.ranges);
    for (ParameterRange& range : ranges) range.parameter += base;
    plan.data.push_back({TensorView{nullptr, group.of.count, Dtype::kF32, ranks.device}});
    plan.wires.push_back(group.of.wire);
  }
  plan.replicate_size = ranks.replicate.size();
  plan.device = ranks.device;
  return plan;
}

void RowReducer::Parts::require_fits(const RowGroup& group, std::string_view what,
                                     const TensorView& values) const {
  const auto refuse = [&](const std::string& expected, const std::string& got,
                          const std::string& remedy = {}) {
    const std::string where = "replica_hook: " + std::string(what) + " of " + group.name;
    throw UsageError({.where = where, .expected = expected, .got = got, .remedy = remedy});
  };
  if (values.count != group.count) {
    refuse(std::to_string(group.count) + " elements", std::to_string(values.count));
  }
  const bool is_total = what == kTotal;
  if (is_total ? values.dtype != Dtype::kF32 : !sums_in_f32(values.dtype)) {
    refuse(is_total ? "f32" : "f32, bf16 or f16", std::string(name(values.dtype)));
  }
  if (!(values.device == ranks.device)) {
    refuse("memory on " + to_string(ranks.device), to_string(values.device),
           "make the mesh for the model's device");
  }
}

std::vector<reducer::RowCheck::Run> RowReducer::Parts::runs() const {
  std::vector<reducer::RowCheck::Run> all;
  for (int g = 0; g < std::ssize(groups); ++g) {
    const RowGroup& of = groups[static_cast<std::size_t>(g)].of;
    for (const ParameterRange& range : of.ranges) {
      const HopParameter& parameter = of.parameters[static_cast<std::size_t>(range.parameter)];
      all.push_back({g, range, "'" + parameter.name + "' of " + of.name});
    }
  }
  return all;
}

// Once the last step has ended for it.
void RowReducer::Parts::prepare_hop() {
  if (!owner || prepared == content->word()) return;
  prepared = content->word();
  outcome.guard(reducer::kNoStep, [&] { owner->prepare(hop_plan()); });
  outcome.rethrow_failure("replica hop");
}

void RowReducer::Parts::add_up(int number, const Row& row, const TensorView& total,
                               Stream& stream) {
  const std::size_t g = steps.index(number);
  sums.add_up(g, row.values, steps.keeps(number), total, stream);
  steps.forget_kept(number);
  if (!is_alone()) over_replicas(number, row, total, stream);
  sums.close_total(g, stream);
}

void RowReducer::Parts::over_replicas(int number, const Row& row, const TensorView& total,
                                      Stream& stream) {
  Group& rows = group(number);
  if (std::exchange(rows.means_step, steps.step()) != steps.step()) {
    rows.means = hop->means(number, static_cast<float>(ranks.replicate.size()));
  }
  const auto replicas = ranks.replicate.size();
  HopBucket bucket;
  bucket.bucket = number;
  bucket.data = total;
  bucket.arithmetic = hop_arithmetic({.shard_size = row.shard_size,
                                      .replicate_size = replicas,
                                      .replica_wire = hop->wire().value_or(rows.of.wire),
                                      .carry_count = steps.carry_count(number),
                                      .replicates = true,
                                      .ends_step = true,
                                      .divisor = static_cast<float>(replicas),
                                      .means = rows.means})
                          .replica;
  bucket.nonfinite = sums.nonfinite();
  bucket.planned = true;
  steps.note_row(number, row.shard_size);
  Operation operation(ranks.operations,
                      {.kind = OperationKind::kReplicaHop,
                       .step = steps.step(),
                       .index = number,
                       .bytes = static_cast<std::int64_t>(total.size_in_bytes())});
  const Event reduced = hop->reduce(bucket, stream);
  const bool is_done = ranks.on_host() && reduced.complete();
  operation.end(is_done ? OperationState::kDone : OperationState::kIssued);
  sums.follow(reduced, stream);
  if (check.is_due(steps.step())) {
    if (!check.has_begun(steps.step())) check.begin(steps.step(), runs());
    check.add(number, total, stream);
  }
  ++reduce_count;
}

RowReducer::RowReducer(const Mesh& mesh, std::vector<RowGroup> groups,
                       std::shared_ptr<ReplicaHop> hop, std::int64_t verify_every) {
  if (!hop) hop = std::make_shared<PlainHop>();
  Communicator world = mesh.world();
  reducer::together(world, "make its replica hook", start_flight_writer);
  compare_models(groups, *hop, verify_every, world);
  parts_ = std::make_unique<Parts>(reducer::make_groups(mesh, "replica_hook"), std::move(groups),
                                   std::move(hop), verify_every);
  if (parts_->is_alone()) {
    parts_->hop->set_unused();
    return;
  }
  parts_->owner.emplace(parts_->ranks, parts_->hop, [this] { return parts_->hop_plan(); });
  parts_->prepared = parts_->content->word();
  parts_->steps.add_party(parts_->hop);
  parts_->steps.add_party(parts_->content);
}

RowReducer::~RowReducer() = default;
RowReducer::RowReducer(RowReducer&&) noexcept = default;
RowReducer& RowReducer::operator=(RowReducer&&) noexcept = default;

void RowReducer::set_groups(std::vector<RowGroup> groups) {
  parts_->outcome.rethrow_failure("set_groups");
  parts_->steps.close_complete_step("set_groups");
  if (!parts_->steps.begins_step() || groups.size() != parts_->groups.size()) {
    throw UsageError({.where = "replica_hook",
                      .expected = "parameters frozen or thawed between steps, in the same modules",
                      .got = "a change within a step, or in other modules",
                      .remedy = "change requires_grad between steps only, or close() the handle "
                                "and make a new replica_hook"});
  }
  parts_->sums.wait();
  parts_->content->set(groups);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    RowGroup& of = parts_->groups[g].of;
    if (groups[g].count != of.count) parts_->sums.release(g);
    of = std::move(groups[g]);
  }
}

bool RowReducer::begins_step() const { return parts_->steps.begins_step(); }

void RowReducer::set_requires_all_reduce(bool flag, std::span<const int> groups) {
  parts_->outcome.rethrow_failure("set_requires_all_reduce");
  parts_->steps.set_requires_all_reduce(flag, groups);
}

bool RowReducer::requires_all_reduce(int group) const {
  return parts_->steps.requires_all_reduce(group);
}

void RowReducer::keep(int group, const Row& row, const Stream& stream) {
  parts_->outcome.rethrow_failure("keep");
  parts_->require_fits(parts_->group(group).of, kGradients, row.values);
  reducer::RowSteps& steps = parts_->steps;
  parts_->sums.keep(steps.index(group), row.values, steps.keeps(group), stream);
  steps.count_kept(group);
}

void RowReducer::reduce(int group, const Row& row, TensorView total, Stream& stream) {
  parts_->outcome.rethrow_failure("reduce");
  const RowGroup& of = parts_->group(group).of;
  parts_->steps.begin_reduce();
  try {
    if (row.values.data != nullptr) parts_->require_fits(of, kGradients, row.values);
    parts_->require_fits(of, kTotal, total);
  } catch (const UsageError& error) {
    reject(error.what());
    throw;
  }
  parts_->steps.agree();
  parts_->prepare_hop();
  std::exception_ptr error;
  try {
    return parts_->add_up(group, row, total, stream);
  } catch (...) {
    error = std::current_exception();
  }
  if (parts_->is_alone()) std::rethrow_exception(error);
  parts_->steps.fail(error);
  parts_->let_go_of_hop(reducer::text_of(error));  // which may be using the total
  parts_->outcome.rethrow_failure("reduce");
}

void RowReducer::reject(std::string_view message) { parts_->steps.reject(std::string(message)); }

void RowReducer::end_backward() { parts_->steps.end_backward(); }

void RowReducer::leave_backward() { parts_->steps.leave_backward(); }

std::vector<int> RowReducer::begin_finish() {
  parts_->outcome.rethrow_failure("finish");
  std::vector<int> left = parts_->steps.begin_finish();
  parts_->prepare_hop();
  return left;
}

void RowReducer::end_finish() {
  parts_->outcome.rethrow_failure("finish");
  parts_->steps.end_finish();
}

void RowReducer::abandon_step(std::string_view reason) noexcept { parts_->steps.abandon(reason); }

void RowReducer::close() { parts_->close(); }

std::int64_t RowReducer::count(int group) const { return parts_->group(group).of.count; }

bool RowReducer::keeps(int group) const { return parts_->steps.keeps(group); }

std::int64_t RowReducer::kept_bytes() const {
  std::int64_t bytes = 0;
  for (int g = 0; g < std::ssize(parts_->groups); ++g) {
    if (keeps(g)) bytes += parts_->sums.bytes(parts_->steps.index(g));
  }
  return bytes;
}

std::int64_t RowReducer::all_reduce_count() const { return parts_->reduce_count; }

std::int64_t RowReducer::replica_hop_bytes() const {
  return parts_->owner ? parts_->owner->wire_bytes() : 0;
}

}  // namespace hsdp
