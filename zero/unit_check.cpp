#include "zero/unit_check.h"

#include <optional>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "hsdp/kernels/digest.h"

namespace hsdp::zero {

UnitCheck::UnitCheck(std::int64_t every, Device device, Communicator world, std::string key,
                     std::vector<Unit> units)
    : every_(every),
      world_(std::move(world)),
      key_(std::move(key)),
      units_(std::move(units)),
      begins_{0},
      is_taken_(units_.size()) {
  for (const Unit& unit : units_) begins_.push_back(begins_.back() + unit.parameters.size());
  digests_ = reducer::Digests(device, begins_.back());
}

void UnitCheck::gathered(std::size_t unit, std::span<const TensorView> arrays,
                         const Stream& stream) {
  if (!is_due() || is_taken_[unit]) return;
  is_taken_[unit] = true;
  for (std::size_t p = 0; p < arrays.size(); ++p) {
    kernels::add_digest(arrays[p], 0, digests_.at(begins_[unit] + p), stream);
  }
}

void UnitCheck::before_update() {
  if (is_due()) {
    require_equal();
    digests_.clear();
    is_taken_.assign(units_.size(), false);
  }
  ++update_count_;
}

// A rank that has gathered a unit has gathered it with its whole shard group.
void UnitCheck::require_equal() {
  std::vector<std::optional<std::uint64_t>> digests(units_.size());
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (is_taken_[u]) digests[u] = digests_.together(begins_[u], begins_[u + 1] - begins_[u]);
  }
  const std::string key = key_ + "/" + std::to_string(update_count_);
  world_.post(key, {.most = reducer::claims(digests)});
  const std::vector<std::int64_t> most = world_.collect(key, "verify_every").most;
  std::size_t unit = 0;
  while (unit < units_.size() && !reducer::differs(most, unit)) ++unit;
  if (unit == units_.size()) return;
  std::vector<std::optional<std::string>> texts(units_[unit].parameters.size());
  for (std::size_t p = 0; is_taken_[unit] && p < texts.size(); ++p) {
    texts[p] = std::to_string(*digests_.at(begins_[unit] + p));
  }
  const auto found = reducer::find_difference(world_, world_, key + "/unit", std::move(texts));
  const std::string where =
      units_[unit].name + "' on all ranks before update " + std::to_string(update_count_);
  Message message{.where = "zero: unit gather: verify_every",
                  .expected = "the same parameters of unit '" + where,
                  .got = "others, which were the same at a second look",
                  .remedy = reducer::kDifferenceRemedy};
  comm::Failure failure{comm::FailureKind::kMismatch, {}, {}};
  if (found) {
    message.expected = "the same '" + units_[unit].parameters[found->place] + "' of unit '" + where;
    message.got = found->text;
    failure.ranks = found->ranks;
  }
  failure.message = message.text();
  world_.engine()->control().fail(failure);
  comm::throw_failure(failure);
}

}  // namespace hsdp::zero
