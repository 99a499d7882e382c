#include "hsdp/gather_lane.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/compare_lines.h"
#include "hsdp/reducer/frozen.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/lane.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/together.h"

namespace hsdp {
namespace {

// Lanes that ranks make in another order, or for other parameters, would mix their gathers.
void compare(Communicator& world, const std::string& name, const std::vector<std::string>& lines) {
  std::vector<std::string> all{"lane '" + name + "'"};
  all.insert(all.end(), lines.begin(), lines.end());
  const auto difference = reducer::compare_lines(world, all, "compare lane '" + name + "'");
  if (!difference) return;
  const std::string rank = comm::ranks_text({difference->rank}, world.size());
  throw MismatchError({.where = "reducer: make_lane",
                       .expected = difference->expected + " on every rank",
                       .got = difference->got + " on " + rank,
                       .remedy = "make the same lanes in the same order on every rank"},
                      {world.world_rank(difference->rank)});
}

}  // namespace

struct GatherLane::Parts {
  Parts(const std::string& name, reducer::Groups its_groups,
        std::shared_ptr<IssueOrder::Issuer> issuer)
      : outcome(its_groups.world),
        groups(std::move(its_groups)),
        key(groups.world.next_exchange_key() + "/"),
        lane(name.c_str(), groups.device, outcome, std::move(issuer)) {}

  reducer::Outcome outcome;
  reducer::Groups groups;
  std::string key;
  std::int64_t agreements = 0;
  std::int64_t turns = 0;
  reducer::Lane lane;
  std::weak_ptr<IssueOrder::Issuer> of_reducer{};
};

GatherLane::GatherLane(reducer::Groups& groups, const std::string& name,
                       const std::vector<std::string>& lines, const reducer::Frozen* reducer) {
  Communicator& world = groups.world;
  compare(world, name, lines);
  const std::string quoted = "'" + name + "'";
  reducer::Groups own = groups;
  own.operations = groups.operations.of("lane " + quoted, world.next_exchange_key());
  // Not split from the Reducer's groups, which its lanes may be using.
  const auto split = [&world](const Communicator& group) {
    return world.split(group.world_ranks().front(), group.rank());
  };
  reducer::together(world, "make the group of lane " + quoted,
                    [&] { own.shard = split(groups.shard); });
  if (groups.parts > 1) {
    reducer::together(world, "make the replicas' group of lane " + quoted,
                      [&] { own.replicate = split(groups.replicate); });
  }
  std::shared_ptr<IssueOrder::Issuer> issuer = reducer::add_issuer(groups);
  reducer::together(world, "start lane " + quoted, [&] {
    parts_ = std::make_unique<Parts>(name, std::move(own), std::move(issuer));
    if (reducer != nullptr) parts_->of_reducer = reducer->issuer();
  });
}

GatherLane::~GatherLane() {
  try {
    parts_->lane.synchronize();
    parts_->groups.shard.wait(parts_->lane.stream().record());
  } catch (...) {  // was the Events'
  }
}

Event GatherLane::run(const Event& after, Task task, int unit) {
  parts_->lane.give_here();
  if (const auto of_reducer = parts_->of_reducer.lock()) of_reducer->give_here();
  return parts_->lane.run(
      {.scope = reducer::Lane::Scope::kAllRanks, .after = after},
      [parts = parts_.get(), task = std::move(task), unit](Stream& stream) {
        parts->outcome.rethrow_failure("gather lane");
        Operation operation(
            parts->groups.operations,
            {.kind = OperationKind::kGather, .turn = parts->turns++, .index = unit});
        task(parts->groups.shard, stream);
        if (!parts->groups.on_host()) operation.end(OperationState::kIssued);
      });
}

comm::Agreement GatherLane::agree(const comm::Saying& mine, std::string_view act) {
  const bool on_host = parts_->groups.on_host();
  Communicator& group = on_host ? parts_->groups.shard : parts_->groups.world;
  const std::string key =
      on_host ? group.next_exchange_key() : parts_->key + std::to_string(parts_->agreements++);
  group.post(key, mine);
  return group.collect(key, act);
}

void GatherLane::on_need(std::function<void()> give) {
  parts_->lane.on_need(std::move(give));
  if (const auto of_reducer = parts_->of_reducer.lock()) of_reducer->meet_first();
}

void GatherLane::stop_repeating() { parts_->lane.stop_repeating(); }

reducer::Groups& GatherLane::groups() { return parts_->groups; }

void GatherLane::wait(const Event& done) {
  parts_->groups.operations.await(done, [&] { parts_->groups.shard.wait(done); });
}

}  // namespace hsdp
