// The ledger of a step against a model that recounts the step's history each time.
#include "hsdp/reducer/step_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "hsdp/divide_factors.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

using Holds = StepLedger::Holds;
using Phase = StepLedger::Phase;

constexpr int kShard = 3;
constexpr int kReplicate = 2;

struct Model {
  struct Microbatch {
    std::vector<Sync> sync;
    bool fresh = true;
  };
  int group_count = 1;
  std::vector<Microbatch> history{};  // of the pending step
  bool begun = false;                 // a step that has not ended
  bool has_result = false;
  std::int64_t step = -1;
  std::int64_t steps = 0;
  std::int64_t microbatches = 0;

  [[nodiscard]] GroupPlan plan(int group, const Microbatch& next) const {
    std::int64_t local = 0;
    std::int64_t carry = 0;
    bool total = false;
    for (const Microbatch& past : history) {
      local += past.fresh ? 1 : 0;
      const Sync sync = past.sync[static_cast<std::size_t>(group)];
      if (sync == Sync::kNone) continue;
      carry = sync == Sync::kAll ? 0 : carry + local;
      total = total || sync == Sync::kAll;
      local = 0;
    }
    local += next.fresh ? 1 : 0;
    return {next.sync[static_cast<std::size_t>(group)], local, carry + local, carry > 0, total};
  }
  void end(const Microbatch& did) {
    microbatches += did.fresh ? 1 : 0;
    history.push_back(did);
    has_result = std::ranges::all_of(did.sync, [](Sync sync) { return sync == Sync::kAll; });
    if (!has_result) return;
    begun = false;
    history.clear();
    ++steps;
  }
  void drop() {
    if (has_result) --steps;
    begun = false;
    history.clear();
    has_result = false;
  }
  [[nodiscard]] Holds holds() const {
    return has_result ? Holds::kResult : history.empty() ? Holds::kNothing : Holds::kPending;
  }
};

void expect_same(const MicrobatchPlan& got, const Model& model, const Model::Microbatch& next) {
  EXPECT_EQ(got.step, model.step);
  EXPECT_EQ(got.microbatch, std::ranges::count(model.history, true, &Model::Microbatch::fresh));
  EXPECT_EQ(got.begins_step, model.history.empty());
  EXPECT_EQ(got.fresh, next.fresh);
  EXPECT_EQ(got.ends_step(), std::ranges::count(next.sync, Sync::kAll) == std::ssize(next.sync));
  ASSERT_EQ(std::ssize(got.groups()), model.group_count);
  for (int g = 0; g < model.group_count; ++g) {
    const GroupPlan want = model.plan(g, next);
    const GroupPlan& group = got.group(g);
    EXPECT_EQ(group.sync, want.sync);
    EXPECT_EQ(group.local_count, want.local_count);
    EXPECT_EQ(group.carry_count, want.carry_count);
    EXPECT_EQ(group.has_carry, want.has_carry);
    EXPECT_EQ(group.has_total, want.has_total);
  }
}

TEST(StepLedger, CountsWhatItsHistoryHolds) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&random](int count) { return static_cast<int>(random() % count); };
    Model model{.group_count = 1 + static_cast<int>(seed % 3)};
    StepLedger ledger(kShard, kReplicate);
    ledger.set_group_count(model.group_count);
    for (int move = 0; move < 200; ++move) {
      switch (pick(8)) {
        default: {  // a microbatch, ended or dropped
          Model::Microbatch next;
          for (int g = 0; g < model.group_count; ++g) {
            next.sync.push_back(static_cast<Sync>(pick(3)));
          }
          if (!model.begun) {
            ++model.step;
            model.has_result = false;
            model.begun = true;
          }
          const MicrobatchPlan plan = ledger.begin(next.sync);
          EXPECT_EQ(ledger.phase(), Phase::kCollecting);
          EXPECT_TRUE(ledger.begun());
          expect_same(plan, model, next);
          if (pick(6) == 0) {
            ledger.drop();
            model.drop();
          } else {
            ledger.end(plan);
            model.end(next);
          }
          break;
        }
        case 0: {  // finish
          if (!ledger.pending()) break;
          const Model::Microbatch next{
              std::vector<Sync>(static_cast<std::size_t>(model.group_count), Sync::kAll), false};
          const MicrobatchPlan plan = ledger.begin_finish();
          expect_same(plan, model, next);
          ledger.end(plan);
          model.end(next);
          break;
        }
        case 1:  // another rank dropped the step, which this rank may have ended
          ledger.drop();
          model.drop();
          break;
        case 2:  // begun before its first microbatch, and perhaps dropped before it
          if (ledger.pending()) {
            EXPECT_THROW(ledger.begin_step(), UsageError);
            break;
          }
          if (!model.begun) {
            ++model.step;
            model.has_result = false;
          }
          model.begun = true;
          ledger.begin_step();
          if (pick(2) == 0) {
            ledger.drop();
            model.drop();
          }
          break;
      }
      EXPECT_EQ(ledger.begun(), model.begun);
      EXPECT_EQ(ledger.phase(), Phase::kIdle);
      EXPECT_EQ(ledger.holds(), model.holds());
      EXPECT_EQ(ledger.counts().steps, model.steps);
      EXPECT_EQ(ledger.counts().microbatches, model.microbatches);
      EXPECT_EQ(ledger.counts().begun_steps, model.step + 1);
    }
  }
}

TEST(StepLedger, AResultKeepsWhatItWasDividedBy) {
  StepLedger ledger(kShard, kReplicate);
  ledger.set_loss_scale(8);
  ledger.end(ledger.begin({Sync::kShard}));
  EXPECT_EQ(ledger.divide_factor(), kShard) << "a partial";
  EXPECT_EQ(ledger.loss_scale(), 8);
  const MicrobatchPlan last = ledger.begin({Sync::kAll});
  EXPECT_EQ(last.divisor(), kShard * kReplicate * 8);
  ledger.end(last);
  EXPECT_EQ(ledger.divide_factor(), kShard * kReplicate);
  ledger.set_gradient_divide_factor(5);
  ledger.set_loss_scale(4);
  EXPECT_EQ(ledger.divide_factor(), kShard * kReplicate) << "of the result that stands";
  EXPECT_EQ(ledger.loss_scale(), 8);
  EXPECT_EQ(ledger.begin({Sync::kAll}).divisor(), 20);
}

// Which groups have local sums with different counts on different ranks is remembered until they
// are reduced.
TEST(StepLedger, KnowsWhoseCountsDiffer) {
  constexpr Intake kWindow{.most = Intake::kAnyNumber, .adds = true, .counts_differ = true};
  StepLedger ledger(kShard, kReplicate);
  ledger.set_group_count(2);
  const auto run = [&ledger](Sync first, Sync second, const Intake& intake = {}) {
    const MicrobatchPlan plan = ledger.begin({first, second}, intake);
    ledger.end(plan);
    return plan.counts_differ;
  };
  EXPECT_FALSE(run(Sync::kNone, Sync::kNone));
  EXPECT_TRUE(run(Sync::kNone, Sync::kNone, kWindow));
  EXPECT_TRUE(ledger.has_local_sums());
  EXPECT_TRUE(run(Sync::kShard, Sync::kNone)) << "both groups' sums are pending";
  EXPECT_TRUE(run(Sync::kShard, Sync::kShard)) << "the second group's are";
  EXPECT_FALSE(run(Sync::kShard, Sync::kNone)) << "all were reduced";
  EXPECT_TRUE(run(Sync::kShard, Sync::kNone, kWindow));
  const MicrobatchPlan finish = ledger.begin_finish();
  EXPECT_TRUE(finish.counts_differ);
  ledger.end(finish);
  EXPECT_FALSE(ledger.has_local_sums());
  EXPECT_TRUE(run(Sync::kNone, Sync::kNone, kWindow));
  ledger.drop();
  EXPECT_FALSE(run(Sync::kAll, Sync::kAll));
}

TEST(StepLedger, AWindowIsOneMicrobatch) {
  StepLedger ledger(kShard, kReplicate);
  ledger.set_requires_gradient_sync(false, std::nullopt);
  for (const bool drops : {false, true}) {
    EXPECT_THROW(ledger.require_window_end(), UsageError);
    const MicrobatchPlan window = ledger.begin_window({Sync::kShard}, {});
    EXPECT_TRUE(ledger.in_window());
    EXPECT_THROW(ledger.end_inside(), UsageError);
    for (int pass = 0; pass < 3; ++pass) {
      ledger.set_requires_gradient_sync(true, std::nullopt);
      ledger.begin_inside();
      EXPECT_THROW(ledger.begin_inside(), UsageError);
      EXPECT_THROW(ledger.require_window_end(), UsageError);
      EXPECT_THROW(ledger.set_requires_all_reduce(true, std::nullopt), UsageError);
      ledger.end_inside();
    }
    ledger.require_window_end();
    EXPECT_EQ(ledger.counts().microbatches, drops ? 1 : 0);
    if (!drops) ledger.end(window);
    EXPECT_EQ(ledger.counts().microbatches, 1);
    ledger.drop();
    EXPECT_FALSE(ledger.in_window());
    EXPECT_EQ(ledger.sync_of(MicrobatchOptions{}), std::vector<Sync>{Sync::kNone})
        << "the flags are as before";
  }
}

}  // namespace
}  // namespace hsdp::reducer
