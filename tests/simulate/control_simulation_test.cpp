// The control plane in virtual time, and the simulator itself.
#include "tests/simulate/control_simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace hsdp::simulate {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Outcome run(const Options& options) { return ControlSimulation(options).run(); }

TEST(ControlSimulation, EveryLinkCarriesOneMessageEachWayAWord) {
  for (const int hosts : {1, 8, 64}) {
    const Options options{.hosts = hosts, .words = 5};
    const Outcome outcome = run(options);
    EXPECT_THAT(outcome.broken_promises, IsEmpty());
    EXPECT_EQ(outcome.links.size(), static_cast<std::size_t>(options.size() - 1));
    for (const auto& [rank, link] : outcome.links) {
      EXPECT_EQ(link.messages_out, options.words) << "to rank " << rank;
      EXPECT_EQ(link.messages_in, options.words) << "from rank " << rank;
    }
  }
}

TEST(ControlSimulation, ASeedGivesOneRunAndAnotherAnother) {
  const auto times = [](std::uint64_t seed) { return run({.hosts = 3, .seed = seed}).word_us; };
  EXPECT_EQ(times(1), times(1));
  EXPECT_NE(times(1), times(2));
}

// At every event, every rank and every host.
TEST(ControlSimulation, WhoeverIsKilledWheneverIsNamedByAllWithinTwoSeconds) {
  const Options plain{.hosts = 2, .ranks_per_host = 3, .words = 2, .equal_words = false};
  const std::int64_t events = run(plain).events;
  ASSERT_GT(events, 50);
  std::vector<std::vector<int>> victims{{0}, {1}, {2}, {3}, {4}, {5}, {0, 1, 2}, {3, 4, 5}, {2, 3}};
  for (const auto& killed : victims) {
    for (std::int64_t event = 0; event < events; ++event) {
      Options options = plain;
      options.seed = static_cast<std::uint64_t>(event);
      options.kill_at = event;
      options.killed = killed;
      EXPECT_THAT(run(options).broken_promises, IsEmpty())
          << "killed rank " << killed[0] << " of " << killed.size() << " at event " << event;
    }
  }
}

TEST(ControlSimulation, LargeWorldsKeepTheirPromisesToo) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    Options options{.hosts = 16, .words = 3, .seed = seed};
    options.kill_at = static_cast<std::int64_t>(seed) * 100;
    options.killed = {static_cast<int>(seed * 37 % 128)};
    EXPECT_THAT(run(options).broken_promises, IsEmpty()) << "seed " << seed;
  }
}

TEST(ControlSimulation, ARankThatIsNotToldOfTheEndIsFound) {
  const Outcome outcome = run({.hosts = 2, .kill_at = 30, .killed = {5}, .untold = 9});
  EXPECT_THAT(outcome.broken_promises, Contains(HasSubstr("rank 9 does not raise within 2 s")));
}

}  // namespace
}  // namespace hsdp::simulate
