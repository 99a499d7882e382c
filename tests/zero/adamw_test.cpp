// AdamW on slices: the bits of one process on whole arrays, skipped and clipped updates, resuming,
// and refused input.
#include "zero/adamw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"
#include "tests/zero/sliced_parameters.h"
#include "zero/adamw_kernels.h"
#include "zero/parameter_gather.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;
using zero::AdamW;
using zero::AdamWOptions;
using zero::AdamWParameter;

constexpr AdamWOptions kOptions{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.3};
constexpr int kMicrobatches = 2;

Values initial(const ParameterSpec& spec) {
  return random_values(element_count(spec.shape), spec.dtype, 99, {-3, 0});
}

// One process's AdamW on whole arrays, element by element, with fp32 masters of 16-bit parameters.
class Alone {
 public:
  explicit Alone(const std::vector<ParameterSpec>& specs) {
    for (const ParameterSpec& spec : specs) {
      values_.push_back(initial(spec));
      first_.emplace_back(values_.back().size());
      second_.emplace_back(values_.back().size());
    }
  }
  void update(const std::vector<Values>& gradients, const float* factor = nullptr,
              const float* found_inf = nullptr) {
    zero::adamw_tick(
        {.options = kOptions, .grad_factor = factor, .found_inf = found_inf, .clock = &clock_},
        Stream::inline_host());
    if (clock_.numbers.skip != 0) return;
    for (std::size_t p = 0; p < values_.size(); ++p) {
      zero::adamw_reference({values_[p].data(), gradients[p].data(), first_[p].data(),
                             second_[p].data(), static_cast<std::int64_t>(values_[p].size())},
                            clock_.numbers);
    }
  }
  [[nodiscard]] const Values& values(std::size_t p) const { return values_[p]; }

 private:
  std::vector<Values> values_;
  std::vector<Values> first_;
  std::vector<Values> second_;
  zero::AdamWClock clock_;
};

// Parameters of which an optimizer updates slices, with masters if they have 16 bits.
SlicedParameters sliced(Reducer& reducer, const std::vector<ParameterSpec>& specs) {
  return {reducer, specs, SlicedParameters::Masters::kOf16Bits, initial};
}
std::vector<AdamWParameter> updated(SlicedParameters& parameters) {
  std::vector<AdamWParameter> all;
  for (std::size_t p = 0; p < parameters.specs().size(); ++p) {
    all.push_back({parameters.specs()[p].name, parameters.own(p)});
  }
  return all;
}
void expect(const SlicedParameters& parameters, const Alone& alone, const std::string& label) {
  for (std::size_t p = 0; p < parameters.specs().size(); ++p) {
    parameters.expect(p, alone.values(p), label);
  }
}

// Integers: their sums are exact in any order, and so is the mean over four ranks.
std::vector<Values> mean_gradients(const StepCase& step, MeshShape shape) {
  std::vector<Values> means;
  for (const Gradients& of_parameter : step.gradients) {
    Values& mean = means.emplace_back(of_parameter[0][0]->size());
    for (const auto& of_microbatch : of_parameter) {
      for (const auto& of_rank : of_microbatch) {
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += (*of_rank)[i];
      }
    }
    for (float& value : mean) value /= static_cast<float>(shape.size());
  }
  return means;
}

void run_microbatches(Reducer& reducer, const StepCase& step, int rank) {
  for (int m = 0; m < kMicrobatches; ++m) {
    run_microbatch(reducer, step, m, rank, {.last = m + 1 == kMicrobatches});
  }
}

struct AdamWCase {
  MeshShape shape;
  Dtype dtype = Dtype::kF32;
  Sync partial_sync = Sync::kShard;  // stage 2; kNone: stage 1
  ShardOver shard_over = ShardOver::kShard;
};

void PrintTo(const AdamWCase& row, std::ostream* out) {
  *out << to_string(row.shape) << "_" << name(row.dtype)
       << (row.partial_sync == Sync::kShard ? "_stage2_" : "_stage1_") << word_of(row.shard_over);
}

class AdamWOnSlices : public testing::TestWithParam<AdamWCase> {};

TEST_P(AdamWOnSlices, HasTheBitsOfOneProcess) {
  const auto& [shape, dtype, partial_sync, shard_over] = GetParam();
  constexpr int kSteps = 4;
  std::vector<StepCase> steps;
  for (std::uint64_t s = 0; s < kSteps; ++s) {
    steps.push_back(integer_step(odd_parameters(dtype), shape.size(), kMicrobatches, s));
  }
  run_mesh(shape, [&, shape = shape, sync = partial_sync, over = shard_over](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 512, .shard_over = over});
    reducer.set_partial_sync(sync);
    SlicedParameters parameters = sliced(reducer, steps[0].parameters);
    AdamW optimizer(reducer, updated(parameters), kOptions);
    zero::ParameterGather gather(reducer, parameters.gathered(), 256);
    Alone alone(steps[0].parameters);
    Stream stream = Stream::inline_host();
    for (int s = 0; s < kSteps; ++s) {
      const StepCase& step = steps[static_cast<std::size_t>(s)];
      run_microbatches(reducer, step, mesh.rank());
      // The second step is clipped, the third one is skipped.
      const float factor = s == 1 ? 0.37F : 1.0F;
      const float found_inf = s == 2 ? 1.0F : 0.0F;
      gather.fence(stream);
      optimizer.update(stream, {.grad_factor = &factor, .found_inf = &found_inf});
      gather.start_all(stream.record());
      alone.update(mean_gradients(step, shape), &factor, &found_inf);
      gather.wait_all();
      expect(parameters, alone, "step " + std::to_string(s));
    }
    EXPECT_EQ(optimizer.steps(stream), kSteps - 1);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cases, AdamWOnSlices,
    testing::Values(AdamWCase{{1, 1}}, AdamWCase{{2, 2}}, AdamWCase{{2, 2}, Dtype::kBf16},
                    AdamWCase{{2, 2}, Dtype::kF16}, AdamWCase{{1, 2}, Dtype::kF32, Sync::kNone},
                    AdamWCase{{2, 2}, Dtype::kBf16, Sync::kNone},
                    AdamWCase{{2, 2}, Dtype::kF32, Sync::kShard, ShardOver::kMesh},
                    AdamWCase{{3, 2}, Dtype::kBf16, Sync::kNone, ShardOver::kMesh}),
    testing::PrintToStringParamName());

// Reducers of one mesh, each with an optimizer.
struct Trained {
  Trained(const Mesh& mesh, std::span<const StepCase> steps) {
    for (const StepCase& step : steps) {
      Reducer& reducer = *owners.emplace_back(std::make_unique<Reducer>(mesh));
      reducers.push_back(&reducer);
      parameters.push_back(std::make_unique<SlicedParameters>(sliced(reducer, step.parameters)));
      optimizers.push_back(std::make_unique<AdamW>(reducer, updated(*parameters.back()), kOptions));
    }
  }
  void update(const zero::AdamWUpdate& how = {}) const {
    Stream stream = Stream::inline_host();
    for (const auto& optimizer : optimizers) optimizer->update(stream, how);
  }

  std::vector<std::unique_ptr<Reducer>> owners;
  std::vector<Reducer*> reducers;
  std::vector<std::unique_ptr<SlicedParameters>> parameters;
  std::vector<std::unique_ptr<AdamW>> optimizers;
};

TEST(AdamW, ClipsByAFactorWithTheBitsOfScaledGradients) {
  const std::vector<StepCase> steps{
      random_step(odd_parameters(Dtype::kF32), 4, {Sync::kShard, Sync::kAll}, 11),
      random_step(odd_parameters(Dtype::kBf16), 4, {Sync::kShard, Sync::kAll}, 12)};
  for (const std::size_t reducer_count : {1U, 2U}) {
    const std::span<const StepCase> own = std::span(steps).first(reducer_count);
    run_mesh({2, 2}, [&](const Mesh& mesh) {
      const Trained scaled(mesh, own);
      const Trained by_factor(mesh, own);
      for (const double max_norm : {0.25, 1e9, 0.5}) {
        for (const Trained* const trained : {&scaled, &by_factor}) {
          for (std::size_t r = 0; r < reducer_count; ++r) {
            static_cast<void>(run_step(*trained->reducers[r], own[r], mesh.rank()));
          }
        }
        const double want = clip_grad_norm(scaled.reducers, max_norm);
        const double before_s = scaled.reducers.front()->stats().update_s;
        scaled.update();
        EXPECT_GT(scaled.reducers.front()->stats().update_s, before_s);
        double norm = -1.0;
        float factor = -1.0F;
        clip_factor(by_factor.reducers, max_norm, {&norm, 1, Dtype::kF64, {}},
                    {&factor, 1, Dtype::kF32, {}})
            .wait();
        by_factor.update({.grad_factor = &factor});
        EXPECT_EQ(norm, want);
        EXPECT_EQ(factor < 1.0F, max_norm < 1.0);
        for (std::size_t r = 0; r < reducer_count; ++r) {
          for (std::size_t p = 0; p < own[r].parameters.size(); ++p) {
            const std::string& name = own[r].parameters[p].name;
            const zero::AdamWMoments got = by_factor.optimizers[r]->moments(name);
            const zero::AdamWMoments wanted = scaled.optimizers[r]->moments(name);
            expect_same_bits(values_of(by_factor.parameters[r]->own(p)),
                             values_of(scaled.parameters[r]->own(p)), name);
            expect_same_bits(values_of(got.first), values_of(wanted.first), name + ", first");
            expect_same_bits(values_of(got.second), values_of(wanted.second), name + ", second");
          }
        }
      }
    });
  }
}

// On a worker's stream, after the Reducer has written. An infinite gradient skips the whole update,
// so that no parameter changes.
TEST(AdamW, SkipsWhatTheReducerHasFoundInTheOrderOfItsStream) {
  for (const bool overflows : {false, true}) {
    StepCase step = integer_step(odd_parameters(Dtype::kF32), 2, kMicrobatches, 8);
    if (overflows) {
      (*step.gradients[2][1][1])[3] = std::numeric_limits<float>::infinity();
    }
    run_mesh({1, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      SlicedParameters parameters = sliced(reducer, step.parameters);
      AdamW optimizer(reducer, updated(parameters), kOptions);
      zero::ParameterGather gather(reducer, parameters.gathered());
      Stream stream = Stream::host_worker("optimizer");
      run_microbatches(reducer, step, mesh.rank());
      float found_inf = overflows ? 0.0F : 1.0F;  // the Reducer overwrites it
      stream.wait(reducer.found_inf({&found_inf, 1, Dtype::kF32, {}}));
      optimizer.update(stream, {.found_inf = &found_inf});
      gather.start_all(stream.record());
      gather.wait_all();
      Alone alone(step.parameters);
      if (!overflows) alone.update(mean_gradients(step, {1, 2}));
      expect(parameters, alone, overflows ? "skipped" : "by a worker");
      EXPECT_EQ(optimizer.steps(stream), overflows ? 0 : 1);
      if (overflows) {
        EXPECT_THAT(values_of(optimizer.moments("large").first), testing::Each(0.0F));
      }
    });
  }
}

// Loads into an optimizer that had another learning rate.
TEST(AdamW, GoesOnFromItsMomentsAndSteps) {
  const StepCase step = integer_step(odd_parameters(Dtype::kF32), 1, kMicrobatches, 9);
  run_mesh({1, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedParameters parameters = sliced(reducer, step.parameters);
    Alone alone(step.parameters);
    Stream stream = Stream::inline_host();
    AdamW before(reducer, updated(parameters), kOptions);
    AdamW after(reducer, updated(parameters),
                {.lr = 1.0, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.3});
    after.set_learning_rate(kOptions.lr);
    EXPECT_THROW(after.set_learning_rate(-1.0), UsageError);
    EXPECT_EQ(after.options().lr, kOptions.lr);
    for (int s = 0; s < 6; ++s) {
      run_microbatches(reducer, step, mesh.rank());
      if (s == 3) {
        for (const ParameterSpec& spec : step.parameters) {
          const zero::AdamWMoments from = before.moments(spec.name);
          const zero::AdamWMoments to = after.moments(spec.name);
          if (from.first.count == 0) continue;
          std::memcpy(to.first.data, from.first.data, from.first.size_in_bytes());
          std::memcpy(to.second.data, from.second.data, from.second.size_in_bytes());
        }
        after.set_steps(before.steps(stream), stream);
        EXPECT_EQ(after.steps(stream), 3);
      }
      (s < 3 ? before : after).update(stream);
      alone.update(mean_gradients(step, {1, 1}));
    }
    expect(parameters, alone, "resumed");
  });
}

// Eight bytes, plus padding: each moment of a slice begins on a multiple of 16 elements.
TEST(AdamW, KeepsEightBytesForEachElementOfItsSlices) {
  const std::vector<ParameterSpec> even{{.name = "w", .shape = {64, 64}}};
  for (const auto& specs : {even, odd_parameters(Dtype::kF32), odd_parameters(Dtype::kBf16)}) {
    run_mesh({1, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      SlicedParameters parameters = sliced(reducer, specs);
      const ReducerStats before = reducer.stats();
      std::int64_t bytes = 0;
      for (const ParameterSpec& spec : specs) {
        bytes += 8 * ((reducer.slice(spec.name).count + 15) / 16 * 16);
      }
      {
        const AdamW optimizer(reducer, updated(parameters), kOptions);
        EXPECT_EQ(reducer.stats().optimizer_bytes, bytes);
        EXPECT_EQ(reducer.stats().resident_bytes, before.resident_bytes + bytes);
        const AdamW another(reducer, updated(parameters), kOptions);
        EXPECT_EQ(reducer.stats().optimizer_bytes, 2 * bytes);
      }
      EXPECT_EQ(reducer.stats().optimizer_bytes, 0) << "given back";
      EXPECT_EQ(reducer.stats().resident_bytes, before.resident_bytes);
      EXPECT_EQ(reducer.stats().peak_resident_bytes, before.resident_bytes + 2 * bytes);
    });
  }
}

TEST(AdamW, RefusesWhatDoesNotFit) {
  struct Fault {
    std::function<void(std::vector<AdamWParameter>& parameters, AdamWOptions& options)> make;
    std::string text;
  };
  const std::vector<Fault> faults{
      {[](auto& p, auto&) { p[1].name = "unknown"; }, "'unknown'"},
      {[](auto& p, auto&) { p[1] = p[0]; }, "expected every parameter once, got 'rows' twice"},
      {[](auto& p, auto&) { p[1].slice.count = 3; },
       "slice of 'odd': expected 7 f32 on cpu, this rank's slice, got 3 f32 on cpu"},
      {[](auto& p, auto&) { p[2].slice.dtype = Dtype::kBf16; }, "needs an fp32 master"},
      {[](auto& p, auto&) { p[1].slice.data = nullptr; }, "got a null pointer"},
      {[](auto& p, auto&) {
         p[1].slice.device = {DeviceType::kCuda, 0};
       },
       "got 7 f32 on cuda"},
      {[](auto&, auto& o) { o.lr = -1e-3; }, "lr: expected a finite number of at least 0"},
      {[](auto&, auto& o) { o.beta1 = 1.0; }, "beta1: expected at least 0 and below 1"},
      {[](auto&, auto& o) { o.beta2 = -0.1; }, "beta2: expected at least 0 and below 1"},
      {[](auto&, auto& o) { o.epsilon = std::nan(""); }, "epsilon: expected a finite number"},
      {[](auto&, auto& o) { o.weight_decay = HUGE_VAL; }, "weight_decay: expected a finite"},
  };
  run_mesh({1, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedParameters parameters = sliced(reducer, odd_parameters(Dtype::kF32));
    for (const Fault& fault : faults) {
      std::vector<AdamWParameter> given = updated(parameters);
      AdamWOptions options = kOptions;
      fault.make(given, options);
      EXPECT_THAT([&] { const AdamW optimizer(reducer, given, options); },
                  testing::ThrowsMessage<UsageError>(HasSubstr(fault.text)));
    }
    AdamW optimizer(reducer, updated(parameters), kOptions);
    Stream stream = Stream::inline_host();
    EXPECT_THAT([&] { optimizer.update(stream); },
                testing::ThrowsMessage<UsageError>(HasSubstr("shard")))
        << "there is no result yet";
    EXPECT_EQ(optimizer.steps(stream), 0);
    EXPECT_THAT([&] { static_cast<void>(optimizer.moments("unknown")); },
                testing::ThrowsMessage<UsageError>(HasSubstr("'unknown'")));
    EXPECT_THAT([&] { optimizer.set_steps(-1, stream); },
                testing::ThrowsMessage<UsageError>(HasSubstr("expected at least 0, got -1")));
  });
}

TEST(AdamW, RefusesGradientsOfF64) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {7}, .dtype = Dtype::kF64});
    Values slice(7);
    const std::vector<AdamWParameter> given{{"w", {slice.data(), 7, Dtype::kF32, {}}}};
    EXPECT_THAT([&] { const AdamW optimizer(reducer, given, kOptions); },
                testing::ThrowsMessage<UsageError>(
                    HasSubstr("gradients of 'w': expected f32, bf16 or f16, got f64")));
  });
}

}  // namespace
}  // namespace hsdp
