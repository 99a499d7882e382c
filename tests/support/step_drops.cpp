#include "tests/support/step_drops.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "hsdp/error.h"

namespace hsdp::test {
namespace {

using Peers = DropCase::Peers;

// The rank that drops does so between microbatches by abandon_step() or by its Step's end, in turn.
void drop_it(Reducer& reducer, const DropActions& actions, const DropCase& drop) {
  const int m = static_cast<int>(drop.before.size());
  if (drop.inside) return actions.broken_microbatch(m, *drop.inside);
  if (drop.ranks % 2 == 0) reducer.abandon_step("of this rank's own");
  throw OwnError();
}

void go_on(Reducer& reducer, const DropActions& actions, const DropCase& drop) {
  int m = static_cast<int>(drop.before.size());
  if (drop.inside) actions.microbatch(m++, *drop.inside);
  if (m == 0) actions.microbatch(m++, Sync::kNone);
  switch (drop.peers) {
    case Peers::kContinue:
      if (drop.inside != Sync::kAll) {
        actions.microbatch(m++, Sync::kShard);
        actions.microbatch(m, Sync::kAll);
      }
      static_cast<void>(reducer.grad_norm());
      return;
    case Peers::kFinish:
      reducer.finish();
      return;
    case Peers::kDiscard:
      reducer.discard();
  }
}

}  // namespace

void PrintTo(const DropCase& drop, std::ostream* out) {
  constexpr const char* kSync[] = {"none", "shard", "all"};
  constexpr const char* kPeers[] = {"continue", "finish", "discard"};
  *out << "after";
  for (const Sync sync : drop.before) *out << ' ' << kSync[static_cast<int>(sync)];
  if (drop.inside) *out << " inside " << kSync[static_cast<int>(*drop.inside)];
  *out << " ranks " << drop.ranks << ", peers " << kPeers[static_cast<int>(drop.peers)];
}

std::vector<DropCase> every_drop(int size) {
  std::vector<DropCase> moments{{.before = {}}};
  const std::vector<std::vector<Sync>> pasts{
      {}, {Sync::kNone}, {Sync::kShard}, {Sync::kShard, Sync::kNone}};
  for (const std::vector<Sync>& past : pasts) {
    if (!past.empty()) moments.push_back({.before = past});
    for (const Sync sync : {Sync::kNone, Sync::kShard, Sync::kAll}) {
      moments.push_back({.before = past, .inside = sync});
    }
  }
  std::vector<DropCase> drops;
  for (DropCase drop : moments) {
    for (drop.ranks = 1; drop.ranks < 1U << size; ++drop.ranks) {
      for (const Peers peers : {Peers::kContinue, Peers::kFinish, Peers::kDiscard}) {
        drop.peers = peers;
        drops.push_back(drop);
      }
    }
  }
  return drops;
}

void run_drop(Reducer& reducer, const DropActions& actions, const DropCase& drop, int rank,
              const std::vector<std::vector<float>>& expected) {
  SCOPED_TRACE(testing::PrintToString(drop) + ", rank " + std::to_string(rank));
  const ReducerState before = reducer.state();
  const bool drops = (drop.ranks >> rank & 1U) != 0;
  // A drop inside `all` ends the step. Nothing is left to finish or discard, which they report at
  // once or in the next call.
  const bool hears = drop.peers != Peers::kDiscard || drop.inside == Sync::kAll;
  bool aborted = false;
  bool own = false;
  try {
    const Step step(reducer);
    for (int m = 0; m < static_cast<int>(drop.before.size()); ++m) {
      actions.microbatch(m, drop.before[static_cast<std::size_t>(m)]);
    }
    if (drops) {
      drop_it(reducer, actions, drop);
    } else {
      go_on(reducer, actions, drop);
    }
  } catch (const StepAbortedError& error) {
    aborted = true;
    EXPECT_EQ(error.ranks().size(), 1U);
    EXPECT_TRUE((drop.ranks >> error.ranks().front() & 1U) != 0) << error.what();
  } catch (const OwnError&) {
    own = true;
  }
  EXPECT_EQ(own, drops);
  if (!drops && !aborted && hears) {
    // The drop was not read yet: the next step's begin reports it.
    EXPECT_THROW(reducer.begin_step(), StepAbortedError);
  }
  EXPECT_FALSE(reducer.state().step_begun);
  EXPECT_EQ(actions.clean_step(), expected);
  EXPECT_EQ(reducer.state().step, before.step + 2);
}

}  // namespace hsdp::test
