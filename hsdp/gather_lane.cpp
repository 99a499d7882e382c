#include "hsdp/gather_lane.h"

#include <utility>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/compare_lines.h"
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
        lane(name.c_str(), groups.device, outcome, std::move(issuer)) {}

  reducer::Outcome outcome;
  reducer::Groups groups;
  reducer::Lane lane;
};

GatherLane::GatherLane(reducer::Groups& groups, const std::string& name,
                       const std::vector<std::string>& lines) {
  Communicator& world = groups.world;
  compare(world, name, lines);
  const std::string quoted = "'" + name + "'";
  reducer::Groups own = groups;
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
  });
}

GatherLane::~GatherLane() {
  try {
    parts_->lane.synchronize();
    parts_->groups.shard.wait(parts_->lane.stream().record());
  } catch (...) {  // was the Events'
  }
}

Event GatherLane::run(const Event& after, Task task) {
  return parts_->lane.run({.scope = reducer::Lane::Scope::kAllRanks, .after = after},
                          [parts = parts_.get(), task = std::move(task)](Stream& stream) {
                            parts->outcome.rethrow_failure("gather lane");
                            task(parts->groups.shard, stream);
                          });
}

void GatherLane::come_anywhere() { parts_->lane.come_anywhere(); }

reducer::Groups& GatherLane::groups() { return parts_->groups; }

void GatherLane::wait(const Event& done) { parts_->groups.shard.wait(done); }

}  // namespace hsdp
