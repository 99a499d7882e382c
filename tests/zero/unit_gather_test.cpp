// Gathers of units: what arrives, ranks that ask for other units than their peers, and what is
// refused.
#include "zero/unit_gather.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;
using zero::ParameterUnit;
using zero::UnitGather;
using zero::UnitParameter;

// Units of parameters of which this rank keeps slices: the same ones in each, and one that the
// Reducer does not know.
class SlicedUnits {
 public:
  static constexpr std::int64_t kFrozenCount = 11;

  SlicedUnits(Reducer& reducer, Dtype dtype, int unit_count, bool has_masters = true)
      : dtype_(dtype), stored_dtype_(has_masters ? Dtype::kF32 : dtype) {
    for (int u = 0; u < unit_count; ++u) {
      for (ParameterSpec spec : odd_parameters(dtype)) {
        spec.name += " of " + std::to_string(u);
        reducer.register_parameter(spec);
        add(u, spec.name, element_count(spec.shape));
      }
      add(u, "frozen of " + std::to_string(u), kFrozenCount);
    }
    reducer.prepare();
    for (Kept& one : kept_) {
      one.own = one.is_frozen() ? UnitGather::even_slice(one.count, reducer.layout().shard_size(),
                                                         reducer.shard_rank())
                                : reducer.slice(one.name);
      one.stored.resize(static_cast<std::size_t>(one.own.count) * size_bytes(stored_dtype_));
    }
    update(0);
  }

  // What an optimizer leaves in step `step`.
  void update(int step) {
    step_ = step;
    for (std::size_t k = 0; k < kept_.size(); ++k) {
      const Values whole = values(k);
      const auto begin = whole.begin() + kept_[k].own.offset;
      std::ranges::copy(encoded({begin, begin + kept_[k].own.count}, stored_dtype_),
                        kept_[k].stored.begin());
    }
  }
  [[nodiscard]] std::vector<ParameterUnit> units() {
    std::vector<ParameterUnit> all;
    for (Kept& one : kept_) {
      if (all.empty() || all.back().name != unit_name(one.unit)) {
        all.push_back({unit_name(one.unit), {}});
      }
      all.back().parameters.push_back(
          {one.name, dtype_, one.count, {one.stored.data(), one.own.count, stored_dtype_, {}}});
    }
    return all;
  }
  // Arrays of a unit, full of something else.
  [[nodiscard]] std::vector<TensorView> arrays(int unit) {
    std::vector<TensorView> views;
    for (Kept& one : kept_) {
      if (one.unit != unit) continue;
      one.whole = encoded(Values(static_cast<std::size_t>(one.count), -1.0F), dtype_);
      views.push_back({one.whole.data(), one.count, dtype_, {}});
    }
    return views;
  }
  void expect(int unit, const std::string& label) const {
    for (std::size_t k = 0; k < kept_.size(); ++k) {
      if (kept_[k].unit != unit) continue;
      Values want = values(k);
      for (float& value : want) value = round_to(dtype_, value);
      expect_same_bits(decoded(kept_[k].whole, dtype_), want, label + " " + kept_[k].name);
    }
  }

 private:
  struct Kept {
    int unit = 0;
    std::string name;
    std::int64_t count = 0;
    Slice own{};
    std::vector<std::byte> stored;  // stays where it is
    std::vector<std::byte> whole;
    [[nodiscard]] bool is_frozen() const { return name.starts_with("frozen"); }
  };

  static std::string unit_name(int unit) { return "layer." + std::to_string(unit); }
  void add(int unit, std::string name, std::int64_t count) {
    kept_.push_back({.unit = unit, .name = std::move(name), .count = count});
  }
  [[nodiscard]] Values values(std::size_t k) const {
    return random_values(kept_[k].count, Dtype::kF32,
                         (1000 * static_cast<std::uint64_t>(step_)) + k, {-8, 8});
  }

  Dtype dtype_;
  Dtype stored_dtype_;
  int step_ = 0;
  std::vector<Kept> kept_;
};

struct UnitCase {
  MeshShape shape;
  Layout layout = Layout::kFlat;
};

void PrintTo(const UnitCase& row, std::ostream* out) {
  *out << to_string(row.shape) << "_" << name(row.layout);
}

class Units : public testing::TestWithParam<UnitCase> {};

TEST_P(Units, AreWholeWhenTheyWereWaitedFor) {
  constexpr int kUnits = 3;
  const auto& [shape, layout] = GetParam();
  for (const Dtype dtype : kDtypes) {
    for (const bool has_masters : {true, false}) {
      run_mesh(shape, [&](const Mesh& mesh) {
        Reducer reducer(mesh, {.layout = layout, .bucket_bytes = 512});
        SlicedUnits sliced(reducer, dtype, kUnits, has_masters);
        UnitGather gather(reducer, sliced.units());
        for (int step = 0; step < 3; ++step) {
          sliced.update(step);
          gather.gather(0, sliced.arrays(0), {});
          for (int u = 0; u < kUnits; ++u) {
            if (u + 1 < kUnits) gather.gather(u + 1, sliced.arrays(u + 1), {});  // ahead
            gather.wait(u);
            sliced.expect(u, "step " + std::to_string(step));
          }
          gather.begin_update().wait();
        }
        // The small parameters of a unit travel together.
        EXPECT_EQ(gather.stats().gather_count, mesh.shard_size() == 1 ? 0 : 3 * kUnits);
      });
    }
  }
}

TEST_P(Units, MayDifferBetweenRanks) {
  constexpr int kUnits = 4;
  const auto& [shape, layout] = GetParam();
  run_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.layout = layout, .bucket_bytes = 512});
    SlicedUnits sliced(reducer, Dtype::kBf16, kUnits);
    UnitGather gather(reducer, sliced.units());
    std::mt19937 random(static_cast<unsigned>(mesh.rank()));
    for (int step = 0; step < 6; ++step) {
      sliced.update(step);
      // Rank 0 asks for nothing in some steps.
      const int count = mesh.rank() == 0 && step % 2 == 0 ? 0 : static_cast<int>(random() % 9);
      for (int i = 0; i < count; ++i) {
        const int unit = static_cast<int>(random() % kUnits);
        gather.gather(unit, sliced.arrays(unit), {});
        gather.wait(unit);
        sliced.expect(unit, "round " + std::to_string(i) + " of step " + std::to_string(step));
        if (random() % 4 == 0) gather.end().wait();  // not as often on every rank
      }
      gather.begin_update().wait();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Units,
                         testing::Values(UnitCase{{1, 1}}, UnitCase{{1, 2}}, UnitCase{{1, 3}},
                                         UnitCase{{2, 2}}, UnitCase{{2, 1}},
                                         UnitCase{{1, 3}, Layout::kDim0},
                                         UnitCase{{1, 3}, Layout::kWhole}),
                         testing::PrintToStringParamName());

// Several ranks that want one unit in one round share its gather.
TEST(UnitGather, GathersOnceWhatSeveralRanksWant) {
  run_mesh({1, 3}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedUnits sliced(reducer, Dtype::kF32, 2);
    UnitGather gather(reducer, sliced.units());
    if (mesh.rank() != 1) {
      gather.gather(1, sliced.arrays(1), {});
      gather.wait(1);
      sliced.expect(1, "wanted by two");
    }
    gather.end().wait();
    EXPECT_EQ(gather.stats().gather_count, 1);
    gather.gather(mesh.rank() == 2 ? 1 : 0, sliced.arrays(mesh.rank() == 2 ? 1 : 0), {});
    gather.end().wait();
    EXPECT_EQ(gather.stats().gather_count, 3) << "two wanted one, and one the other";
    EXPECT_EQ(reducer.stats().parameter_gather_bytes, 0) << "scratch is given back";
  });
}

// A large parameter goes straight into its array.
TEST(UnitGather, SendsLargeParametersByThemselves) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 1 << 18});
    constexpr std::int64_t kCount = 1 << 18;
    reducer.register_parameter({.name = "large", .shape = {kCount}});
    reducer.register_parameter({.name = "small", .shape = {8}});
    reducer.prepare();
    Values large(static_cast<std::size_t>(reducer.slice("large").count),
                 1.0F + static_cast<float>(mesh.rank()));
    Values small(static_cast<std::size_t>(reducer.slice("small").count), 5.0F);
    const auto view = [](Values& values) {
      return TensorView{values.data(), static_cast<std::int64_t>(values.size()), Dtype::kF32, {}};
    };
    UnitGather gather(reducer, {{.name = "layer",
                                 .parameters = {{"small", Dtype::kF32, 8, view(small)},
                                                {"large", Dtype::kF32, kCount, view(large)}}}});
    Values whole_small(8);
    Values whole_large(kCount);
    gather.gather(0, {view(whole_small), view(whole_large)}, {});
    gather.wait(0);
    EXPECT_EQ(gather.stats().gather_count, 2);
    EXPECT_EQ(gather.stats().bytes, 4 * (kCount + 8));
    EXPECT_THAT(whole_small, testing::Each(5.0F));
    EXPECT_EQ(std::ranges::count(whole_large, 1.0F), kCount / 2);
    EXPECT_EQ(std::ranges::count(whole_large, 2.0F), kCount / 2);
    gather.end().wait();
  });
}

// What one rank gets wrong is its own error, the others hear of it, and all may try again.
TEST(UnitGather, RefusesWhatDoesNotFit) {
  struct Fault {
    std::function<void(std::vector<UnitParameter>& parameters)> make;
    std::string text;
  };
  const std::vector<Fault> faults{
      {[](auto& p) { p[1].count = 3; }, "expected 7 elements, as registered, got 3"},
      {[](auto& p) { p[2].stored.count -= 1; }, "slice of 'large of 0': expected"},
      {[](auto& p) { p[2].stored.data = nullptr; }, "slice of 'large of 0': expected"},
      {[](auto& p) { p[2].stored.dtype = Dtype::kF16; }, "slice of 'large of 0': expected"},
      {[](auto& p) { p.back().count = 13; },
       "slice of 'frozen of 0', which is not registered with the Reducer and so is cut evenly: "
       "expected"},
  };
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    SlicedUnits sliced(reducer, Dtype::kBf16, 2);
    for (const Fault& fault : faults) {
      std::vector<ParameterUnit> given = sliced.units();
      if (mesh.rank() == 1) fault.make(given.front().parameters);
      const auto make = [&] { const UnitGather gather(reducer, given); };
      if (mesh.rank() == 1) {
        const auto error = caught<UsageError>(make);
        ASSERT_TRUE(error) << fault.text;
        EXPECT_THAT(error->what(), HasSubstr(fault.text));
      } else {
        EXPECT_TRUE(caught<StepAbortedError>(make)) << fault.text;
      }
    }
    UnitGather gather(reducer, sliced.units());
    gather.wait(0);  // nothing was gathered
    EXPECT_THAT([&] { gather.gather(2, {}, {}); },
                ThrowsMessage<UsageError>(HasSubstr("expected a unit below 2, got 2")));
    EXPECT_THAT([&] { gather.gather(0, {}, {}); },
                ThrowsMessage<UsageError>(HasSubstr("'layer.0': expected 6 arrays, got 0")));
    std::vector<TensorView> arrays = sliced.arrays(0);
    arrays[1].data = nullptr;
    EXPECT_THAT([&] { gather.gather(0, arrays, {}); },
                ThrowsMessage<UsageError>(HasSubstr("array of 'odd of 0'")));
    gather.gather(1, sliced.arrays(1), {});
    gather.wait(1);
    sliced.expect(1, "after all that");
    gather.end().wait();
  });
}

TEST(UnitGather, IsAgreedOnByAllRanks) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedUnits sliced(reducer, Dtype::kF32, 2);
    std::vector<ParameterUnit> given = sliced.units();
    if (mesh.rank() == 1) std::swap(given[0], given[1]);
    EXPECT_THAT(
        [&] { const UnitGather gather(reducer, given); },
        ThrowsMessage<MismatchError>(AllOf(HasSubstr("expected unit 'layer.0' on every rank"),
                                           HasSubstr("got unit 'layer.1' on rank 1 of 2"))));
  });
}

// Nobody hangs for a rank that neither asks nor ends.
TEST(UnitGather, NamesTheUnitAndTheRankThatDoesNotCome) {
  std::atomic<bool> gave_up = false;
  run_mesh({1, 2},
           [&](const Mesh& mesh) {
             Reducer reducer(mesh);
             SlicedUnits sliced(reducer, Dtype::kF32, 2);
             UnitGather gather(reducer, sliced.units());
             if (mesh.rank() == 1) {
               gave_up.wait(false);
               EXPECT_THROW(gather.end().wait(), TimeoutError) << "what the other one said";
               return;
             }
             gather.gather(1, sliced.arrays(1), {});
             const auto error = caught<TimeoutError>([&] { gather.wait(1); });
             gave_up = true;
             gave_up.notify_all();
             ASSERT_TRUE(error);
             EXPECT_THAT(error->what(), HasSubstr("gather 'layer.1'"));
             EXPECT_EQ(error->ranks(), std::vector<int>{1});
           },
           {.timeout = std::chrono::seconds(1)});
}

}  // namespace
}  // namespace hsdp
