// What LocoHop does beside its arithmetic: figures, refusals, other owners, memory.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <span>
#include <thread>

#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "loco_steps.h"
#include "quant/loco_exchange.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/hop_contract.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::quant {
namespace {

TEST(LocoHop, KeepsWhatEveryHopKeeps) {
  const auto make = [](const LocoOptions& options) {
    return [options] { return std::make_shared<LocoHop>(options); };
  };
  for (const test::MeshShape shape :
       {test::MeshShape{2, 1}, test::MeshShape{2, 2}, test::MeshShape{3, 2}}) {
    test::check_hop_contract(make({.reset_T = 2}), shape);
    test::check_hop_contract(
        make({.group_size = 32, .error_dtype = Dtype::kF32, .exclude = {"norm"}}), shape);
  }
  test::check_hop_contract(make({.bits = 8, .gather = Code::kBf16}), {2, 2});
  test::check_hop_contract(make({.error_feedback = false}), {2, 2});
}

// One group: a 7 and 63 times `rest`; the same on both replicas. Its errors after one step.
std::vector<QuantizationError> errors_with(float rest, std::int64_t every = 1) {
  Configuration made;
  made.options.error_every = every;
  made.names = {"layer.weight"};
  made.counts = {64};
  made.buckets = {{{0, 0, 64, 0}}};
  Step step;
  step.reductions.push_back({{2, {Floats(64, rest)}}, 1.0F});
  for (std::vector<Floats>& sums : step.reductions[0].sums) sums[0][0] = 7.0F;
  std::vector<QuantizationError> errors;
  test::run_world({.size = 2}, [&](Communicator& world) {
    LocoHop hop(made.options);
    const HopPlan plan = plan_of(made);
    hop.prepare(plan);
    hop.bind(world, world.split(0, world.rank()));
    std::atomic<std::uint32_t> nonfinite = 0;
    run_step(hop, made, step, world.rank(), nonfinite);
    EXPECT_TRUE(hop.quantization_error().empty());
    EXPECT_THROW(static_cast<void>(hop.state()), UsageError);
    EXPECT_THROW(hop.scale_errors(0.5F), UsageError);
    hop.end_step({0, StepOutcome::kClean, ""});
    if (world.rank() == 0) errors = hop.quantization_error();
    hop.bind({}, {});
  });
  return errors;
}

TEST(LocoHop, SaysHowMuchItChanges) {
  std::vector<QuantizationError> errors = errors_with(1.25F);  // 7, and 1 for the rest
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_EQ(errors[0].parameter, "layer.weight");
  EXPECT_NEAR(errors[0].scattered, std::sqrt(63 * 0.0625 / (49 + 63 * 1.5625)), 1e-6);
  EXPECT_EQ(errors[0].gathered, 0.0);  // 14 and 2 are 7 and 1 again
  EXPECT_TRUE(errors_with(1.25F, 0).empty());
  testing::internal::CaptureStderr();
  errors = errors_with(0.5F);
  EXPECT_NEAR(errors[0].scattered, std::sqrt(63 * 0.25 / (49 + 63 * 0.25)), 1e-6);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("'layer.weight': quantization changed its gradient by 0.49 of its norm"),
            std::string::npos)
      << text;
}

// A hop with errors of one parameter of 256 elements, on replica `rank` of `world`; the whole of
// it, or another part.
struct Used {
  explicit Used(Communicator& world, LocoOptions options = {}) : hop(std::move(options)) {
    made.names = {"layer.weight"};
    made.counts = {256};
    made.buckets = {{{0, 0, 128, 0}}};
    made.replicas = world.size();
    plan = plan_of(made);
    gather = world.split(0, world.rank());
    hop.prepare(plan);
    hop.bind(world, gather);
    Step step;
    step.reductions.push_back({{static_cast<std::size_t>(world.size()), {Floats(256, 1.3F)}}});
    std::atomic<std::uint32_t> nonfinite = 0;
    run_step(hop, made, step, world.rank(), nonfinite);
    hop.end_step({0, StepOutcome::kClean, ""});
    hop.bind({}, {});
  }
  Configuration made;
  HopPlan plan;
  Communicator gather;
  LocoHop hop;
};

TEST(LocoHop, RefusesAnotherPlaceThatItHasNoErrorsOf) {
  test::run_world({.size = 2}, [](Communicator& world) {
    Used used(world);
    // As another cut, or another shard count, would do.
    used.made.buckets = {{{0, 0, 128, 128}}};
    HopPlan other = plan_of(used.made);
    used.hop.prepare(other);
    try {
      used.hop.bind(world, used.gather);
      ADD_FAILURE() << "expected a UsageError";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("the part of 'layer.weight'"), std::string::npos)
          << error.what();
    }
    used.hop.bind({}, {});
    // Another number of replicas, and what the message says to do.
    other.replicate_size = 1;
    used.hop.prepare(other);
    Communicator alone = world.split(world.rank(), 0);
    EXPECT_THROW(used.hop.bind(alone, alone), UsageError);
    used.hop.bind({}, {});
    for (const HopState& one : used.hop.state()) {
      if (one.key != "replicas") continue;
      EXPECT_EQ(*static_cast<const std::int64_t*>(one.data.data), 2);
    }
    LocoHop fresh;
    fresh.load_state(used.hop.state());
    EXPECT_EQ(fresh.steps(), 1);
    EXPECT_EQ(fresh.state().size(), used.hop.state().size());
    fresh.prepare(used.plan);
    fresh.bind(world, used.gather);
    EXPECT_EQ(fresh.steps(), 1);
    fresh.bind({}, {});
  });
}

TEST(LocoHop, SaysInItsWordThatItsErrorsMove) {
  test::run_world({.size = 2}, [](Communicator& world) {
    Used used(world);
    EXPECT_EQ(used.hop.word(), "1 steps");
    used.hop.prepare(used.plan);
    used.hop.bind(world, used.gather);
    EXPECT_EQ(used.hop.word(), "1 steps moved");
    Step step;
    step.reductions.push_back({{2, {Floats(256, 1.3F)}}});
    std::atomic<std::uint32_t> nonfinite = 0;
    run_step(used.hop, used.made, step, world.rank(), nonfinite);
    EXPECT_EQ(used.hop.word(), "1 steps moved");  // the same all through the step
    used.hop.end_step({0, StepOutcome::kDropped, ""});
    EXPECT_EQ(used.hop.word(), "1 steps");
    used.hop.scale_errors(0.5F);
    EXPECT_LE(used.hop.word().size(), StepParty::kMaxWordBytes);
    EXPECT_NE(used.hop.word(), "1 steps");
    used.hop.bind({}, {});
  });
}

// The next Reducer's first buckets go out while one rank is still in its backward.
TEST(LocoHop, GoesToAnotherReducer) {
  const auto second_step = [](bool changes) {
    std::vector<Floats> means(2);
    test::run_mesh({2, 1}, [&](const Mesh& mesh) {
      const auto hop = std::make_shared<LocoHop>();
      const auto make = [&] {
        auto reducer = std::make_unique<Reducer>(
            mesh, ReducerOptions{.bucket_bytes = 4096, .replica_hop = hop});
        for (const char* const name : {"a", "b"}) {
          reducer->register_parameter({.name = name, .shape = {1024}});
        }
        return reducer;
      };
      std::unique_ptr<Reducer> reducer = make();
      for (int step = 0; step < 2; ++step) {
        if (step == 1 && changes) {
          reducer.reset();
          reducer = make();
        }
        Floats gradient(1024);
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          gradient[i] = std::sin(static_cast<float>(i * (mesh.rank() + 1U)));
        }
        reducer->begin_microbatch({.last = true});
        for (const char* const name : {"a", "b"}) {
          if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
          reducer->gradient_ready(name, {.data = gradient.data(), .shape = {1024}});
        }
        reducer->end_microbatch();
        const TensorView mean = reducer->shard("a");
        const auto* const values = static_cast<const float*>(mean.data);
        means[static_cast<std::size_t>(mesh.rank())] = Floats(values, values + mean.count);
      }
      EXPECT_EQ(hop->steps(), 2);
    });
    return means;
  };
  EXPECT_EQ(second_step(true), second_step(false));
}

// Groups lie at multiples of their size in each parameter, whoever owns it and however it travels.
TEST(LocoHop, GivesSlicesAndWholeParametersTheSameBits) {
  const std::vector<Shape> shapes{{40, 31}, {1000}, {257, 3}, {64}, {}};
  const auto means_of = [&](Layout layout, std::int64_t bucket_bytes) {
    std::vector<Floats> means;
    test::run_mesh({2, 3}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.layout = layout,
                             .bucket_bytes = bucket_bytes,
                             .replica_hop = std::make_shared<LocoHop>()});
      std::vector<Floats> gradients;
      for (const Shape& shape : shapes) {
        const std::string name = std::to_string(gradients.size());
        reducer.register_parameter({.name = name, .shape = shape});
        gradients.emplace_back(static_cast<std::size_t>(element_count(shape)));
      }
      for (int step = 0; step < 3; ++step) {
        reducer.begin_microbatch({.last = true});
        for (std::size_t p = 0; p < shapes.size(); ++p) {
          for (std::size_t i = 0; i < gradients[p].size(); ++i) {
            gradients[p][i] = std::sin(static_cast<float>((i + p) * (mesh.rank() + step + 1U)));
          }
          reducer.gradient_ready(static_cast<int>(p),
                                 {.data = gradients[p].data(), .shape = shapes[p]});
        }
        reducer.end_microbatch();
      }
      std::vector<NamedArray> arrays;
      for (std::size_t p = 0; p < shapes.size(); ++p) {
        arrays.push_back(
            {std::to_string(p),
             TensorView{gradients[p].data(), std::ssize(gradients[p]), Dtype::kF32, Device{}}});
      }
      reducer.gather_gradients(arrays);
      if (mesh.rank() == 0) means = gradients;
    });
    return means;
  };
  const std::vector<Floats> want = means_of(Layout::kFlat, 1 << 20);
  for (const std::int64_t bucket_bytes : {512, 1000, 5000, 1 << 20}) {
    EXPECT_EQ(means_of(Layout::kWhole, bucket_bytes), want) << bucket_bytes;
  }
}

// The factor is known when all words are in, and this hop divides before it sends.
TEST(LocoHop, DividesByTokensThatAllRanksCounted) {
  const auto means_of = [](bool counts) {
    std::vector<Floats> means(4);
    test::run_mesh({2, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.replica_hop = std::make_shared<LocoHop>()});
      reducer.register_parameter({.name = "a", .shape = {1024}, .dtype = Dtype::kF32});
      reducer.register_parameter({.name = "b", .shape = {640}, .group = "late"});
      for (int step = 0; step < 3; ++step) {
        for (int m = 0; m < 2; ++m) {
          Floats gradient(1024);
          for (std::size_t i = 0; i < gradient.size(); ++i) {
            gradient[i] = std::sin(static_cast<float>((i + 3U) * (mesh.rank() + step + m + 1U)));
          }
          if (counts) reducer.divide_by_tokens(5 + 2 * mesh.rank() + m);
          if (!counts) reducer.set_gradient_divide_factor(2 * (5 + 7 + 9 + 11) + 4);
          if (counts && m == 0) {
            reducer.set_requires_all_reduce(false, "late");
            EXPECT_THROW(reducer.begin_microbatch(), UsageError);
            reducer.set_requires_all_reduce(true, "late");
          }
          reducer.begin_microbatch({.last = m == 1});
          reducer.gradient_ready("a", {.data = gradient.data(), .shape = {1024}});
          reducer.gradient_ready("b", {.data = gradient.data(), .shape = {640}});
          reducer.end_microbatch();
        }
        const TensorView mean = reducer.shard("a");
        const auto* const values = static_cast<const float*>(mean.data);
        Floats& all = means[static_cast<std::size_t>(mesh.rank())];
        all.insert(all.end(), values, values + mean.count);
      }
    });
    return means;
  };
  EXPECT_EQ(means_of(true), means_of(false));
}

TEST(LocoHop, LetsWhatItExcludesBeFrozen) {
  test::run_world({.size = 2}, [](Communicator& world) {
    HopPlan plan;
    plan.parameters = {{"norm", {32}}, {"weight", {64}}};
    plan.ranges = {{{0, 0, 32, 0}, {1, 32, 64, 0}}};
    plan.replicate_size = 2;
    LocoHop hop({.exclude = {"norm"}});
    hop.prepare(plan);
    hop.bind(world, world.split(0, world.rank()));
    HopPlan frozen = plan;
    frozen.parameters = {{"weight", {64}}};
    frozen.ranges = {{{0, 0, 64, 0}}};
    EXPECT_NO_THROW(hop.prepare(frozen));
    hop.bind({}, {});
  });
}

TEST(LocoHop, CountsItsMemory) {
  HopPlan plan;
  plan.parameters = {{"layer.weight", {8192}}};
  plan.ranges = {{{0, 0, 8192, 0}}};
  plan.replicate_size = 2;
  const auto bytes_of = [&plan](const LocoOptions& options) {
    LocoHop hop(options);
    hop.prepare(plan);
    return plan.memory.of(MemoryKind::kReplicaHop).live;
  };
  // 1.0625 an element and for each that it owns, twice.
  EXPECT_EQ(bytes_of({}), 2 * (8192 + 4096) * 17 / 16);
  EXPECT_EQ(bytes_of({.error_dtype = Dtype::kF32}), 2 * (8192 + 4096) * 4);
  EXPECT_EQ(bytes_of({.gather = Code::kBf16}), 2 * 8192 * 17 / 16);
  EXPECT_EQ(bytes_of({.error_feedback = false}), 0);
}

TEST(LocoHop, RefusesAPatternThatMatchesNothing) {
  HopPlan plan;
  plan.parameters = {{"layer.weight", {64}}};
  plan.ranges = {{{0, 0, 64, 0}}};
  plan.replicate_size = 2;
  LocoHop hop({.exclude = {"*norm*"}});
  try {
    hop.prepare(plan);
    ADD_FAILURE() << "expected a UsageError";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'*norm*', which matches none"), std::string::npos) << text;
    EXPECT_NE(text.find("layer.weight"), std::string::npos) << text;
  }
  hop.bind({}, {});  // as its owner lets go
}

TEST(Windows, AreCutAtGroupsAndAboutEqual) {
  const std::vector<ParameterRange> ranges{{0, 0, 100, 0}, {1, 100, 5000, 37}, {2, 5200, 64, 0}};
  for (const std::int64_t size : {64, 500, 1 << 20}) {
    const auto windows = cut_into_windows(ranges, 64, size);
    std::int64_t element = 0;
    std::int64_t total = 0;
    for (const auto& window : windows) {
      std::int64_t count = 0;
      for (const ParameterRange& run : window) {
        EXPECT_GE(run.offset, element);
        element = run.offset + run.count;
        count += run.count;
        const ParameterRange& whole = ranges[static_cast<std::size_t>(run.parameter)];
        EXPECT_EQ(run.offset - whole.offset, run.flat_offset - whole.flat_offset);
        EXPECT_TRUE(run.flat_offset == whole.flat_offset || run.flat_offset % 64 == 0);
      }
      EXPECT_LT(count, size + 64);
      total += count;
    }
    EXPECT_EQ(total, 5164);
    EXPECT_EQ(windows.size() == 1, size == 1 << 20);
  }
}

TEST(LocoOptions, NameWhatIsWrong) {
  const auto refused = [](const LocoOptions& options) {
    try {
      const LocoHop hop(options);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({.bits = 5}).find("bits: expected 4 or 8, got 5"), std::string::npos);
  EXPECT_NE(refused({.group_size = 100}).find("multiple of 32"), std::string::npos);
  EXPECT_NE(refused({.err_beta = 1.0}).find("err_beta"), std::string::npos);
  EXPECT_NE(refused({.error_dtype = Dtype::kF32, .stochastic_error = true}).find("stochastic"),
            std::string::npos);
  EXPECT_EQ(refused({}), "");
}

}  // namespace
}  // namespace hsdp::quant
