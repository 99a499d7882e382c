// Results as Events: they complete when the result is there, or throw why there is none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <latch>
#include <limits>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;

constexpr MeshShape kMesh{2, 2};
constexpr int kLateRank = 3;
constexpr std::int64_t kCount = 16;

// A step of one parameter whose mean is `value` everywhere.
void begin(Reducer& reducer, float value, std::vector<float>& gradient) {
  gradient.assign(kCount, value);
  reducer.begin_microbatch({.last = true});
  reducer.gradient_ready("w", {.data = gradient.data(), .shape = {kCount}});
}

// Memory for the forms with an output.
struct Outputs {
  double norm = -1.0;
  float found = -1.0F;
  double norm_of_both = -1.0;
  float factor = -1.0F;
  double clip = -1.0;
  std::array<Event, 4> events;

  // Asks for the norm and found_inf of the second Reducer, and for one factor and one clip of both.
  void ask(Reducer& first, Reducer& second, double max_norm) {
    const std::array<Reducer*, 2> both{&first, &second};
    events = {second.grad_norm({&norm, 1, Dtype::kF64, {}}),
              second.found_inf({&found, 1, Dtype::kF32, {}}),
              clip_factor(both, max_norm, {&norm_of_both, 1, Dtype::kF64, {}},
                          {&factor, 1, Dtype::kF32, {}}),
              clip_grad_norm(both, max_norm, {&clip, 1, Dtype::kF64, {}})};
  }
};

using EndLate = std::function<void(const Mesh&, Reducer& second)>;
using Check = std::function<void(const Mesh&, Reducer& first, Reducer& second, Outputs&)>;

// The first Reducer's step has ended on all ranks, the second one's on all but the late rank, which
// calls `end_late` once all other ranks have their Events. `late_value`: the value of its gradient.
void with_a_late_rank(float late_value, const EndLate& end_late, const Check& check) {
  std::latch asked(kMesh.size() - 1);
  run_patiently(kMesh, [&](const Mesh& mesh) {
    const bool late = mesh.rank() == kLateRank;
    Reducer first(mesh);
    Reducer second(mesh);
    first.register_parameter({.name = "w", .shape = {kCount}});
    second.register_parameter({.name = "w", .shape = {kCount}});
    std::vector<float> gradient;
    std::vector<float> another;
    begin(first, 4.0F, gradient);
    first.end_microbatch();
    begin(second, late ? late_value : 3.0F, another);
    Outputs outputs;
    if (late) {
      asked.wait();
      end_late(mesh, second);
    } else {
      second.end_microbatch();
      outputs.ask(first, second, 10.0);
      for (const Event& event : outputs.events) EXPECT_FALSE(event.complete());
      asked.count_down();
    }
    check(mesh, first, second, outputs);
  });
}

TEST(ResultEvents, ComeBeforeADelayedPeerAndTheValuesWithIt) {
  with_a_late_rank(
      3.0F, [](const Mesh&, Reducer& second) { second.end_microbatch(); },
      [](const Mesh& mesh, Reducer& first, Reducer& second, Outputs& outputs) {
        if (mesh.rank() == kLateRank) outputs.ask(first, second, 10.0);
        for (const Event& event : outputs.events) event.wait();
        EXPECT_EQ(outputs.norm, 12.0);
        EXPECT_EQ(outputs.found, 0.0F);
        EXPECT_EQ(outputs.clip, 20.0);  // the other factor is the first Reducer's 16
        const auto factor = static_cast<float>(10.0 / (20.0 + 1e-6));
        EXPECT_EQ(outputs.norm_of_both, 20.0);
        EXPECT_EQ(outputs.factor, factor);
        EXPECT_EQ(values_of(first.shard("w")), Values(kCount / 2, 4.0F * factor));
        EXPECT_EQ(values_of(second.shard("w")), Values(kCount / 2, 3.0F * factor));
      });
}

TEST(ResultEvents, SayWhatOnlyThePeerMet) {
  with_a_late_rank(
      std::numeric_limits<float>::infinity(),
      [](const Mesh&, Reducer& second) { second.end_microbatch(); },
      [](const Mesh& mesh, Reducer& first, Reducer& second, Outputs& outputs) {
        if (mesh.rank() == kLateRank) outputs.ask(first, second, 10.0);
        for (const Event& event : outputs.events) event.wait();
        EXPECT_EQ(outputs.found, 1.0F);
      });
}

TEST(ResultEvents, OfADroppedStepThrowAndNothingIsClipped) {
  with_a_late_rank(
      3.0F, [](const Mesh&, Reducer& second) { second.abandon_step("on purpose"); },
      [](const Mesh& mesh, Reducer& first, Reducer& second, Outputs& outputs) {
        if (mesh.rank() != kLateRank) {
          for (const Event& event : outputs.events) {
            EXPECT_THAT(caught<StepAbortedError>([&] { event.wait(); }),
                        names({kLateRank}, HasSubstr("on purpose")));
          }
          EXPECT_EQ(outputs.factor, -1.0F);
          EXPECT_EQ(outputs.clip, -1.0);
          EXPECT_THROW(second.finish(), StepAbortedError);
        }
        EXPECT_EQ(values_of(first.shard("w")), Values(kCount / 2, 4.0F));
        std::vector<float> gradient;
        begin(second, 5.0F, gradient);
        second.end_microbatch();
        EXPECT_EQ(second.grad_norm(), 20.0);
        EXPECT_FALSE(second.found_inf());
      });
}

TEST(ResultEvents, OfAFailedWorldThrowItsFailure) {
  with_a_late_rank(
      3.0F, [](const Mesh& mesh, Reducer&) { mesh.world().abort("on purpose"); },
      [](const Mesh& mesh, Reducer&, Reducer&, Outputs& outputs) {
        if (mesh.rank() == kLateRank) return;
        for (const Event& event : outputs.events) {
          EXPECT_THAT(caught<RankError>([&] { event.wait(); }), says(HasSubstr("on purpose")));
        }
      });
}

}  // namespace
}  // namespace hsdp
