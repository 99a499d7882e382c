// Gathers of units on the NCCL engine: beside microbatches, on streams that work late, and on ranks
// that ask for different units.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "nccl_ranks.h"
#include "zero/unit_gather.h"

namespace hsdp::test {
namespace {

using zero::ParameterUnit;
using zero::UnitGather;

constexpr int kUnits = 3;

class NcclUnits : public ::testing::TestWithParam<MeshShape> {
 protected:
  void TearDown() override { stand_in::delay_work({}); }
};

// A unit with every parameter of the step, as fp32 slices on the GPU that are rounded to bf16.
class GpuUnits {
 public:
  GpuUnits(Reducer& reducer, const StepCase& step, const Mesh& mesh, Stream& stream)
      : reducer_(reducer), step_(step), stream_(stream) {
    for (int u = 0; u < kUnits; ++u) {
      for (const ParameterSpec& spec : step.parameters) {
        const std::int64_t count = element_count(spec.shape);
        wholes_.emplace_back(static_cast<std::size_t>(count) * size_bytes(Dtype::kBf16));
        views_.push_back({wholes_.back().data(), count, Dtype::kBf16, mesh.device()});
        stored_.emplace_back(static_cast<std::size_t>(reducer.slice(spec.name).count));
        updated_.emplace_back(stored_.back().size());
      }
    }
  }

  [[nodiscard]] std::vector<ParameterUnit> units() {
    std::vector<ParameterUnit> all;
    for (int u = 0; u < kUnits; ++u) {
      ParameterUnit& unit = all.emplace_back(ParameterUnit{"unit " + std::to_string(u), {}});
      for (std::size_t p = 0; p < step_.parameters.size(); ++p) {
        const std::size_t k = place(u, p);
        unit.parameters.push_back(
            {step_.parameters[p].name,
             Dtype::kBf16,
             views_[k].count,
             {stored_[k].data(), std::ssize(stored_[k]), Dtype::kF32, views_[k].device}});
      }
    }
    return all;
  }
  // On the stream, in its order.
  void update(int number) {
    stream_.synchronize();  // the memory that it copies from is free
    for (int u = 0; u < kUnits; ++u) {
      for (std::size_t p = 0; p < step_.parameters.size(); ++p) {
        const std::size_t k = place(u, p);
        const Values whole = values(number, k);
        const Slice own = reducer_.slice(step_.parameters[p].name);
        std::copy_n(whole.begin() + own.offset, own.count, updated_[k].begin());
        copy_bytes(stored_[k].data(), updated_[k].data(), updated_[k].size() * sizeof(float),
                   stream_);
      }
    }
  }
  [[nodiscard]] std::vector<TensorView> arrays(int u) const {
    const auto first = views_.begin() + static_cast<std::ptrdiff_t>(place(u, 0));
    return {first, first + std::ssize(step_.parameters)};
  }
  void expect(int number, int u, const std::string& label) {
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) {
      const std::size_t k = place(u, p);
      std::vector<std::byte> got(views_[k].size_in_bytes());
      copy_bytes(got.data(), views_[k].data, got.size(), stream_);
      stream_.synchronize();
      Values want = values(number, k);
      for (float& value : want) value = round_to(Dtype::kBf16, value);
      expect_same_bits(decoded(got, Dtype::kBf16), want, label);
    }
  }

 private:
  [[nodiscard]] std::size_t place(int u, std::size_t p) const {
    return (static_cast<std::size_t>(u) * step_.parameters.size()) + p;
  }
  [[nodiscard]] Values values(int number, std::size_t k) const {
    return random_values(views_[k].count, Dtype::kF32,
                         (100 * static_cast<std::uint64_t>(number)) + k, {-4, 4});
  }

  Reducer& reducer_;
  const StepCase& step_;
  Stream& stream_;
  std::vector<std::vector<std::byte>> wholes_;
  std::vector<TensorView> views_;
  std::vector<Values> stored_;
  std::vector<Values> updated_;
};

TEST_P(NcclUnits, AreGatheredBesideMicrobatches) {
  const MeshShape shape = GetParam();
  for (const std::uint64_t seed : {0U, 1U, 2U}) {
    const StepCase step =
        random_step(odd_parameters(Dtype::kBf16), shape.size(), {Sync::kShard, Sync::kAll}, seed);
    const ReducerOptions options{.bucket_bytes = 4096, .verify_every = 2};
    if (seed > 0) stand_in::delay_work(seed);
    const auto results = nccl_results(shape, [&](const Mesh& mesh) {
      Reducer reducer(mesh, options);
      GpuRank rank(reducer, step, mesh);
      reducer.prepare();
      GpuUnits units(reducer, step, mesh, rank.stream());
      UnitGather gather(reducer, units.units());
      RankResult result;
      std::mt19937 random(static_cast<unsigned>(seed) + static_cast<unsigned>(mesh.rank()));
      for (int number = 0; number < 3; ++number) {
        units.update(number);
        for (std::size_t m = 0; m < step.schedule.size(); ++m) {
          for (int i = 0; i < 4; ++i) {
            const int u = seed == 2 ? static_cast<int>(random() % kUnits) : i % kUnits;
            gather.gather(u, units.arrays(u), rank.stream().record());
            if (i == 1) rank.run_microbatch(m);
            gather.wait(u, rank.stream());
            units.expect(number, u, "seed " + std::to_string(seed));
          }
          gather.end(rank.stream().record());
        }
        result = rank.read();
        rank.stream().wait(gather.begin_update(rank.stream().record()));
      }
      rank.stream().synchronize();
      return result;
    });
    expect_reference(results, step, options, shape, "beside gathers");
  }
}

// It asks for no unit, and what it has updated is read all the same.
TEST_P(NcclUnits, OfARankThatOnlyServesAreUpdatedBeforeTheyAreRead) {
  const StepCase step =
      random_step(odd_parameters(Dtype::kBf16), GetParam().size(), {Sync::kAll}, 0);
  stand_in::delay_work(0);
  run_nccl_mesh(GetParam(), [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    GpuRank rank(reducer, step, mesh);
    reducer.prepare();
    Stream& stream = rank.stream();
    GpuUnits units(reducer, step, mesh, stream);
    UnitGather gather(reducer, units.units());
    for (int number = 0; number < 6; ++number) {
      units.update(number);
      const bool serves = mesh.rank() == number % mesh.size();
      for (int u = 0; u < kUnits && !serves; ++u) {
        gather.gather(u, units.arrays(u), stream.record());
        gather.wait(u, stream);
        units.expect(number, u, "number " + std::to_string(number));
      }
      if (number % 2 == 0) gather.end(stream.record());
      stream.wait(gather.begin_update(stream.record()));
    }
    stream.synchronize();
  });
}

TEST_P(NcclUnits, OfADriftedReplicaAreNamed) {
  const StepCase step =
      random_step(odd_parameters(Dtype::kBf16), GetParam().size(), {Sync::kAll}, 0);
  stand_in::delay_work(0);
  run_nccl_mesh(GetParam(), [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.missing = Missing::kZero, .verify_every = 1});
    GpuRank rank(reducer, step, mesh);
    reducer.prepare();
    Stream& stream = rank.stream();
    GpuUnits units(reducer, step, mesh, stream);
    UnitGather gather(reducer, units.units());
    const int own = mesh.rank() < mesh.shard_size() ? 0 : 1;
    for (const int drifted : {0, 1}) {
      units.update(drifted * own);
      Microbatch open(reducer, {.last = true});
      for (int twice = 0; twice < 2; ++twice) {
        gather.gather(1, units.arrays(1), stream.record());
        gather.wait(1, stream);
      }
      gather.end(stream.record());
      open.end();
      if (drifted == 0) stream.wait(gather.begin_update(stream.record()));
    }
    const auto error =
        caught<MismatchError>([&] { stream.wait(gather.begin_update(stream.record())); });
    EXPECT_EQ(error.has_value(), mesh.replicate_size() > 1);
    if (error) {
      EXPECT_THAT(error->what(), ::testing::HasSubstr("of unit 'unit 1' on all ranks"));
    }
    stream.synchronize();
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, NcclUnits,
                         ::testing::Values(MeshShape{1, 2}, MeshShape{2, 2}, MeshShape{1, 3}),
                         ::testing::PrintToStringParamName());

// A model at stage 3: units are gathered for the forward pass and again for the backward pass, in
// which each gets its gradient, unless it is frozen. All elements of unit u's gradient are (u + 1)
// times the rank plus one.
class Stage3 {
 public:
  static constexpr int kNoUnit = -1;
  Stage3(const Mesh& mesh, int units, Missing missing, int frozen = kNoUnit)
      : mesh_(mesh),
        reducer_(mesh, {.reduce_dtype = Dtype::kF32, .bucket_bytes = 256, .missing = missing}),
        stream_(Stream::create(mesh.device(), "caller")),
        units_(units),
        frozen_(frozen) {
    reducer_.set_stream(stream_);
    for (int u = units - 1; u >= 0; --u) {
      if (u == frozen) continue;
      reducer_.register_parameter({.name = name_of(u), .shape = {elements_}});
    }
    reducer_.prepare();
    std::vector<ParameterUnit> all;
    for (int u = 0; u < units; ++u) {
      wholes_.emplace_back(elements_);
      const Slice own =
          u == frozen ? UnitGather::even_slice(elements_, mesh.shard_size(), reducer_.shard_rank())
                      : reducer_.slice(name_of(u));
      stored_.emplace_back(own.count);
      gradients_.emplace_back(elements_, static_cast<float>((u + 1) * (mesh.rank() + 1)));
      all.push_back(
          {name_of(u),
           {{name_of(u),
             Dtype::kF32,
             elements_,
             {stored_.back().data(), std::ssize(stored_.back()), Dtype::kF32, mesh.device()}}}});
    }
    gather_.emplace(reducer_, std::move(all));
  }

  // What this rank leaves out: units, or the gradients of some units that it gathers. What it gives
  // late, and which units it uses again after it has given their gradient.
  struct Odd {
    std::set<int> units{};
    std::set<int> holes{};
    std::set<int> late{};
    std::set<int> again{};
    std::function<void(int unit)> given = [](int) {};
  };
  // One microbatch, which ends the step.
  void step() { step(Odd()); }
  void step(const Odd& odd) {
    Microbatch open(reducer_, {.last = true});
    for (int u = 0; u < units_; ++u) use(u, odd);
    for (int u = units_ - 1; u >= 0; --u) {
      use(u, odd);
      if (!odd.units.contains(u) && !odd.holes.contains(u) && !odd.late.contains(u)) give(u);
      odd.given(u);
      if (odd.again.contains(u)) use(u, odd);
    }
    for (const int u : odd.late) give(u);
    end();
    open.end();
  }
  // A pass over these units, forward and back: each gets its gradient at its last use.
  void run(const std::vector<int>& forward, bool is_last = true) {
    Microbatch open(reducer_, {.last = is_last});
    for (const int u : forward) use(u, {});
    for (auto u = forward.rbegin(); u != forward.rend(); ++u) {
      use(*u, {});
      if (std::find(u + 1, forward.rend(), *u) == forward.rend()) give(*u);
    }
    end();
    open.end();
  }
  // As hsdp.torch does it: the next unit is gathered ahead, guessed from what followed the last two
  // before, and the forward pass's last unit stays.
  void run_ahead(const std::vector<int>& forward, const std::vector<int>& backward,
                 std::chrono::milliseconds pause = {}) {
    Microbatch open(reducer_, {.last = true});
    last_two_ = {-1, -1};
    for (const int u : forward) need(u, false);
    for (const int u : backward) {
      std::this_thread::sleep_for(pause);
      need(u, true);
      give(u);
    }
    requested_.reset();
    end();
    open.end();
  }
  // A pass that an exception leaves after that many units.
  void break_off(const std::vector<int>& forward, int uses) {
    Microbatch open(reducer_, {.last = true});
    std::vector<int> all = forward;
    all.insert(all.end(), forward.rbegin(), forward.rend());
    for (int n = 0; n < uses; ++n) {
      use(all[static_cast<std::size_t>(n)], {});
      if (n >= std::ssize(forward)) give(all[static_cast<std::size_t>(n)]);
    }
    throw std::runtime_error("the test wants it");
  }
  // A pass in which units that are still there get gradients, and none is gathered.
  void run_without_gathers() {
    Microbatch open(reducer_, {.last = true});
    for (int u = units_ - 1; u >= 0; --u) give(u);
    open.end();
  }
  void end() { gather_->end(stream_.record()); }
  void update() { stream_.wait(gather_->begin_update(stream_.record())); }
  // The mean over all ranks, some of which have left units out.
  void expect(const std::vector<Odd>& of_ranks) {
    expect(std::ssize(of_ranks), [&](int u, std::size_t r) {
      return !of_ranks[r].units.contains(u) && !of_ranks[r].holes.contains(u);
    });
  }
  // After microbatches in which this rank and the others have given all gradients.
  void expect_of_microbatches(int count) {
    expect(
        4, [](int, std::size_t) { return true; }, static_cast<float>(count));
  }
  // Or have run() over these.
  void expect(const std::vector<std::vector<int>>& of_ranks) {
    expect(std::ssize(of_ranks), [&](int u, std::size_t r) {
      return std::ranges::find(of_ranks[r], u) != of_ranks[r].end();
    });
  }
  void expect(std::ptrdiff_t count, const std::function<bool(int unit, std::size_t rank)>& gives,
              float microbatches = 1) {
    for (int u = 0; u < units_; ++u) {
      if (u == frozen_) continue;
      float sum = 0;
      for (std::size_t r = 0; r < static_cast<std::size_t>(count); ++r) {
        if (gives(u, r)) sum += static_cast<float>(u + 1) * static_cast<float>(r + 1);
      }
      const TensorView shard = reducer_.shard(name_of(u));
      Values got(static_cast<std::size_t>(shard.count));
      copy_bytes(got.data(), shard.data, shard.size_in_bytes(), stream_);
      stream_.synchronize();
      ASSERT_THAT(got, ::testing::Each(microbatches * sum / static_cast<float>(count)))
          << name_of(u);
    }
  }
  [[nodiscard]] std::int64_t messages() const { return reducer_.stats().control_message_count; }
  [[nodiscard]] Reducer& reducer() { return reducer_; }
  void use(int u, const Odd& odd) {
    if (odd.units.contains(u)) return;
    const auto k = static_cast<std::size_t>(u);
    gather_->gather(u, {{wholes_[k].data(), elements_, Dtype::kF32, mesh_.device()}},
                    stream_.record());
    gather_->wait(u, stream_);
  }
  void give(int u) {
    if (u == frozen_) return;
    reducer_.gradient_ready(name_of(u), {gradients_[static_cast<std::size_t>(u)].data(),
                                         Dtype::kF32,
                                         mesh_.device(),
                                         {elements_},
                                         {}});
  }

 private:
  void need(int u, bool backward) {
    next_[{was_backward_, last_two_}] = {backward, u};
    const bool is_present = last_two_.second == u;
    last_two_ = {last_two_.second, u};
    was_backward_ = backward;
    if (requested_ != u && !is_present) request(u);
    gather_->wait(u, stream_);
    requested_.reset();
    const auto next = next_.find({was_backward_, last_two_});
    if (next == next_.end() || next->second.second == u) return;
    if (!gather_->comes_next(next->second.second)) return;
    requested_ = next->second.second;
    request(*requested_);
  }
  void request(int u) {
    const auto k = static_cast<std::size_t>(u);
    gather_->gather(u, {{wholes_[k].data(), elements_, Dtype::kF32, mesh_.device()}},
                    stream_.record());
  }
  static std::string name_of(int u) { return "unit " + std::to_string(u); }

  const Mesh& mesh_;
  std::int64_t elements_ = 64;
  Reducer reducer_;
  Stream stream_;
  int units_;
  int frozen_;
  std::vector<Values> wholes_;
  std::vector<Values> stored_;
  std::vector<Values> gradients_;
  std::optional<UnitGather> gather_;
  std::map<std::pair<bool, std::pair<int, int>>, std::pair<bool, int>> next_;
  std::pair<int, int> last_two_;
  bool was_backward_ = false;
  std::optional<int> requested_;
};

// How many messages each rank sends in a step, from a given step on.
std::vector<std::int64_t> messages_of_steps(int units) {
  std::vector<std::int64_t> fewest(4);
  run_nccl_mesh({2, 2}, [&](const Mesh& mesh) {
    Stage3 model(mesh, units, Missing::kError);
    std::int64_t least = 1000;
    for (int step = 0; step < 12; ++step) {
      const std::int64_t before = model.messages();
      model.step();
      EXPECT_FALSE(model.reducer().found_inf());
      model.update();
      if (step >= 6) least = std::min(least, model.messages() - before);
    }
    model.expect(std::vector<Stage3::Odd>(4));
    fewest[static_cast<std::size_t>(mesh.rank())] = least;
  });
  return fewest;
}

TEST(NcclStage3, SendsAsMuchForManyUnitsAsForFew) {
  const std::vector<std::int64_t> few = messages_of_steps(2);
  EXPECT_EQ(few, messages_of_steps(64));
  // Rank 0 answers the other ranks.
  EXPECT_THAT(few, ::testing::ElementsAre(8, 6, 6, 6))
      << "a word, a bit, a pass's begin and end, a first bucket, an update";
}

// Now and then one rank leaves out units or gradients, while the others are ahead by their record.
TEST(NcclStage3, ARankMayLeaveOutWhatItLikes) {
  constexpr int kMany = 6;
  run_nccl_mesh({2, 2}, [&](const Mesh& mesh) {
    Stage3 model(mesh, kMany, Missing::kZero);
    std::mt19937 random(1);
    std::int64_t last = 1000;
    for (int step = 0; step < 60; ++step) {
      std::vector<Stage3::Odd> odd(4);
      const bool is_odd = step < 40 && step % 5 == 4;
      for (int n = is_odd ? 1 + static_cast<int>(random() % 3) : 0; n > 0; --n) {
        Stage3::Odd& one = odd[random() % 4];
        const auto u = static_cast<int>(random() % (kMany - 1)) + 1;  // all use the first
        (random() % 2 == 0 ? one.units : one.holes).insert(u);
      }
      const std::int64_t before = model.messages();
      model.step(odd[static_cast<std::size_t>(mesh.rank())]);
      model.expect(odd);
      model.update();
      last = std::min(step < 41 ? 1000 : last, model.messages() - before);
    }
    EXPECT_LE(last, mesh.rank() == 0 ? 9 : 7) << "in a quiet step";
  });
}

constexpr const char* kSentWithout = "its bucket was sent without it";

// A gradient that comes after the other ranks have sent its bucket and after this rank had to. No
// rank sends the first bucket before all have it.
void expect_dropped_step(Missing missing, const Stage3::Odd& what, const std::string& why) {
  std::latch others(3);
  run_nccl_mesh({2, 2}, [&](const Mesh& mesh) {
    Stage3 model(mesh, 4, missing);
    for (int step = 0; step < 20; ++step) {
      const bool is_odd = step == 10;
      if (step == 5) {
        if (mesh.rank() == 1) {
          model.step({.late = {3}});
        } else {
          model.step();
        }
        model.expect(std::vector<Stage3::Odd>(4));
      } else if (!is_odd) {
        model.step();
        model.expect(std::vector<Stage3::Odd>(4));
      } else if (mesh.rank() == 1) {
        try {
          Stage3::Odd odd = what;
          odd.given = [&](int unit) {
            if (unit != 3) return;
            others.wait();
            // They send what they have.
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
          };
          model.step(odd);
          FAIL() << "no error";
        } catch (const UsageError& error) {
          EXPECT_THAT(error.what(), ::testing::HasSubstr("gradient of 'unit 2'"));
          EXPECT_THAT(error.what(), ::testing::HasSubstr(why));
        }
        model.end();
      } else {
        model.step({.given = [&](int unit) {
          if (unit == 0) others.count_down();
        }});
        try {
          static_cast<void>(model.reducer().shard("unit 0"));
          FAIL() << "no error";
        } catch (const StepAbortedError& error) {
          EXPECT_THAT(error.what(), ::testing::HasSubstr("gradient of 'unit 2'"));
        }
      }
      model.update();
    }
  });
}

TEST(NcclStage3, ALateGradientDropsTheStepOnAllRanks) {
  for (const Missing missing : {Missing::kZero, Missing::kError}) {
    expect_dropped_step(missing, {.late = {2}}, kSentWithout);
  }
}

TEST(NcclStage3, AMissingGradientIsNamedInARecordedStep) {
  expect_dropped_step(Missing::kError, {.holes = {2}}, "got none yet");
}

// The other ranks have sent what this rank still has to compute, and help it only afterwards.
TEST(NcclStage3, AUnitThatIsUsedAgainInTheBackwardPassMayDropTheStep) {
  expect_dropped_step(Missing::kZero, {.again = {3}}, kSentWithout);
}

using Uses = std::vector<std::vector<int>>;  // what each rank runs over

// Equal steps, and now and then one in which some ranks follow `change`: all results are right, and
// the last steps send no more messages than equal steps do.
void expect_right_whatever_changes(MeshShape shape, int units,
                                   const std::function<void(Uses& uses, std::mt19937&)>& change) {
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Stage3 model(mesh, units, Missing::kZero);
    std::mt19937 random(static_cast<unsigned>(shape.replicate));
    std::vector<int> all(static_cast<std::size_t>(units));
    std::iota(all.begin(), all.end(), 0);
    std::int64_t least = 1000;
    for (int step = 0; step < 80; ++step) {
      Uses uses(static_cast<std::size_t>(shape.size()), all);
      if (step < 40 && step % 5 == 4) change(uses, random);
      const std::int64_t before = model.messages();
      model.run(uses[static_cast<std::size_t>(mesh.rank())]);
      model.expect(uses);
      model.update();
      if (step >= 60) least = std::min(least, model.messages() - before);
    }
    EXPECT_LE(least, mesh.rank() == 0 ? 9 : 7) << "in a quiet step";
  });
}

// The other ranks would have sent their buckets by the record, but for the first bucket.
TEST(NcclStage3, ARankMayUseAUnitOnceMore) {
  const auto use_more = [](Uses& uses, std::mt19937& random) {
    std::vector<int>& own = uses[random() % uses.size()];
    const auto place = own.begin() + static_cast<std::ptrdiff_t>(random() % own.size());
    own.insert(place, own[random() % own.size()]);
  };
  expect_right_whatever_changes({1, 3}, 6, use_more);
}

TEST(NcclStage3, RanksMaySkipUnitsAtRandom) {
  const auto skip = [](Uses& uses, std::mt19937& random) {
    for (std::vector<int>& own : uses) {
      std::erase_if(own, [&](int) { return random() % 4 == 0; });
    }
  };
  expect_right_whatever_changes({2, 2}, 6, skip);
}

// Like experts: between a first and a last unit each rank uses some of the others, in any order.
TEST(NcclStage3, RanksMayChooseTheirUnits) {
  const auto choose = [](Uses& uses, std::mt19937& random) {
    for (std::vector<int>& own : uses) {
      std::shuffle(own.begin() + 1, own.end() - 1, random);
      own.erase(own.begin() + 2, own.begin() + 2 + static_cast<std::ptrdiff_t>(random() % 4));
    }
  };
  expect_right_whatever_changes({2, 2}, 6, choose);
}

// Gathered ahead of use, also by guesses that are wrong when a step differs from the one before.
// Some units are skipped in the backward pass only.
TEST(NcclStage3, RanksMayGatherAheadAndSkip) {
  constexpr int kMany = 6;
  for (const MeshShape shape : {MeshShape{1, 3}, MeshShape{2, 2}}) {
    run_nccl_mesh(shape, [&](const Mesh& mesh) {
      Stage3 model(mesh, kMany, Missing::kZero);
      std::mt19937 random(static_cast<unsigned>(shape.replicate));
      for (int step = 0; step < 80; ++step) {
        Uses uses(static_cast<std::size_t>(shape.size()), {0, 1, 2, 3, 4, 5});
        Uses forward = uses;
        for (std::size_t r = 0; r < uses.size(); ++r) {
          if (step % 10 < 7 || random() % 2 == 0) continue;
          std::erase_if(uses[r], [&](int) { return random() % 4 == 0; });
          if (random() % 2 == 0) forward[r] = uses[r];
        }
        const auto r = static_cast<std::size_t>(mesh.rank());
        model.run_ahead(forward[r], {uses[r].rbegin(), uses[r].rend()});
        model.expect(uses);
        model.update();
      }
    });
  }
}

// A rank has skipped a unit in one backward pass, and guesses in the next that it will again.
TEST(NcclStage3, AWrongGuessCostsNoStep) {
  constexpr int kFrozen = 3;
  run_nccl_mesh({1, 3}, [&](const Mesh& mesh) {
    Stage3 model(mesh, 6, Missing::kZero, kFrozen);
    for (int step = 0; step < 30; ++step) {
      std::vector<int> backward{5, 4, 3, 2, 1, 0};
      const bool is_odd = mesh.rank() == step / 10;
      if (is_odd && step % 10 == 8) std::erase(backward, kFrozen);
      const std::chrono::milliseconds pause(is_odd && step % 10 == 9 ? 10 : 0);  // others are ahead
      model.run_ahead({0, 1, 2, 3, 4, 5}, backward, pause);
      model.expect(std::vector<Stage3::Odd>(3));
      model.update();
    }
  });
}

// From the first step on, so that groups gather different units.
TEST(NcclStage3, AGroupMaySkipAUnit) {
  for (const int skipped : {0, 1, 2}) {
    run_nccl_mesh({2, 2}, [&](const Mesh& mesh) {
      Stage3 model(mesh, 3, Missing::kZero);
      Uses uses(4, {0, 1, 2});
      for (const std::size_t r : {2U, 3U}) std::erase(uses[r], skipped);
      for (int step = 0; step < 12; ++step) {
        model.run(uses[static_cast<std::size_t>(mesh.rank())]);
        model.expect(uses);
        model.update();
      }
    });
  }
}

// Rank 1 drops one of many equal steps, after the others have issued what they may of it without
// this rank. The steps after that are right.
void expect_right_after_drop(const std::function<void(Stage3& model)>& drop,
                             const std::function<void(Stage3& model)>& go_on) {
  const std::vector<int> all{0, 1, 2, 3};
  run_nccl_mesh({2, 2}, [&](const Mesh& mesh) {
    Stage3 model(mesh, 4, Missing::kZero);
    for (int step = 0; step < 14; ++step) {
      const bool is_dropped = step == 8;
      model.run(all, false);
      if (is_dropped && mesh.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        drop(model);
        model.end();
      } else {
        go_on(model);
        if (is_dropped) {
          EXPECT_THROW(static_cast<void>(model.reducer().shard("unit 0")), StepAbortedError);
        } else {
          model.expect_of_microbatches(2);
        }
      }
      model.update();
    }
  });
}

TEST(NcclStage3, ARankMayDropAStepBetweenMicrobatches) {
  const auto drop = [](Stage3& model) { model.reducer().abandon_step("the test wants it"); };
  expect_right_after_drop(drop, [](Stage3& model) { model.run({0, 1, 2, 3}); });
  expect_right_after_drop(drop, [](Stage3& model) { model.run_without_gathers(); });
}

TEST(NcclStage3, ARankMayDropAStepInAMicrobatch) {
  for (const int uses : {0, 3, 4, 8}) {
    const auto drop = [uses](Stage3& model) {
      EXPECT_THROW(model.break_off({0, 1, 2, 3}, uses), std::runtime_error);
    };
    expect_right_after_drop(drop, [](Stage3& model) { model.run({0, 1, 2, 3}); });
  }
}

}  // namespace
}  // namespace hsdp::test
