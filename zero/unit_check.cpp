#include "zero/unit_check.h"

#include <optional>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/kernels/digest.h"
#include "hsdp/reducer_internal.h"

namespace hsdp::zero {

UnitCheck::UnitCheck(const Reducer& reducer, std::string key, std::vector<Unit> units)
    : reducer_(reducer),
      every_(ReducerInternal(reducer).verify_every()),
      world_(ReducerInternal(reducer).groups().world),
      key_(std::move(key)),
      units_(std::move(units)),
      begins_{0},
      zero_(reducer.device(), 1),
      steps_(units_.size(), -1) {
  for (const Unit& unit : units_) begins_.push_back(begins_.back() + unit.parameters.size());
  digests_ = reducer::Digests(reducer.device(), begins_.back());
}

// Not for a dropped step, whose number may differ between ranks.
bool UnitCheck::is_due() const {
  const ReducerState state = reducer_.state();
  return state.step > compared_step_ && (state.step + 1) % every_ == 0 && !state.step_dropped;
}

std::optional<std::int64_t> UnitCheck::step_of_gather() const {
  const ReducerState state = reducer_.state();
  if (state.phase != ReducerState::Phase::kCollecting || !is_due()) return std::nullopt;
  return state.step;
}

void UnitCheck::gathered(std::size_t unit, std::int64_t step, std::span<const TensorView> arrays,
                         const Stream& stream) {
  steps_[unit] = step;
  for (std::size_t p = 0; p < arrays.size(); ++p) {
    std::uint64_t* const digest = digests_.at(begins_[unit] + p);
    copy_bytes(digest, zero_.at(0), sizeof(*digest), stream);
    kernels::add_digest(arrays[p], 0, digest, stream);
  }
}

void UnitCheck::before_update() {
  if (!is_due()) return;
  compared_step_ = reducer_.state().step;
  require_equal(compared_step_);
}

// A rank that has gathered a unit has gathered it with its whole shard group.
void UnitCheck::require_equal(std::int64_t step) {
  std::vector<std::optional<std::uint64_t>> digests(units_.size());
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (steps_[u] == step) digests[u] = digests_.together(begins_[u], begins_[u + 1] - begins_[u]);
  }
  const std::string key = key_ + "/" + std::to_string(step);
  world_.post(key, {.most = reducer::claims(digests)});
  const std::vector<std::int64_t> most = world_.collect(key, "compare units before an update").most;
  std::size_t unit = 0;
  while (unit < units_.size() && !reducer::differs(most, unit)) ++unit;
  if (unit == units_.size()) return;
  std::vector<std::optional<std::string>> texts(units_[unit].parameters.size());
  for (std::size_t p = 0; digests[unit] && p < texts.size(); ++p) {
    texts[p] = std::to_string(*digests_.at(begins_[unit] + p));
  }
  const reducer::DigestDifference found =
      reducer::find_difference(world_, world_, key + "/unit", std::move(texts)).value();
  const Message message{.where = "zero: unit gather: verify_every",
                        .expected = "the same '" + units_[unit].parameters[found.place] +
                                    "' of unit '" + units_[unit].name +
                                    "' on all ranks before step " + std::to_string(step) +
                                    " was applied",
                        .got = found.text,
                        .remedy = reducer::kDifferenceRemedy};
  const comm::Failure failure{comm::FailureKind::kMismatch, message.text(), found.ranks};
  world_.engine()->control().fail(failure);
  comm::throw_failure(failure);
}

}  // namespace hsdp::zero
