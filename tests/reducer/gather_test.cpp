// gather_gradients and gather_parameters: every rank ends with the whole arrays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <ostream>

#include "hsdp/error.h"
#include "hsdp/reducer/slice_gather.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::ElementsAre;
using testing::HasSubstr;

struct GatherCase {
  MeshShape shape;
  Layout layout;
  ShardOver shard_over = ShardOver::kShard;
};

void PrintTo(const GatherCase& row, std::ostream* out) {
  *out << to_string(row.shape) << "_" << name(row.layout) << "_" << word_of(row.shard_over);
}

class Gather : public testing::TestWithParam<GatherCase> {
 protected:
  [[nodiscard]] static StepCase step() {
    return random_step(odd_parameters(Dtype::kF32), GetParam().shape.size(),
                       {Sync::kShard, Sync::kAll}, 13);
  }
  [[nodiscard]] static ReducerOptions options() {
    return {
        .layout = GetParam().layout, .bucket_bytes = 4 << 10, .shard_over = GetParam().shard_over};
  }
};

struct WholeArrays {
  std::vector<std::vector<std::byte>> memory;
  std::vector<NamedArray> arrays;
};

WholeArrays whole_arrays(const StepCase& step, Dtype dtype, float fill) {
  WholeArrays whole;
  for (const ParameterSpec& spec : step.parameters) {
    const auto count = element_count(spec.shape);
    whole.memory.push_back(encoded(Values(static_cast<std::size_t>(count), fill), dtype));
    whole.arrays.push_back(
        {.name = spec.name,
         .array = {.data = whole.memory.back().data(), .count = count, .dtype = dtype}});
  }
  return whole;
}

TEST_P(Gather, GradientsAreTheWholeMeanRoundedOnce) {
  const StepCase step = this->step();
  const std::vector<Values> means = reference_results(step, options(), GetParam().shape);
  run_reducers(GetParam().shape, step, options(), [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    for (const Dtype dtype : kDtypes) {
      WholeArrays whole = whole_arrays(step, dtype, 9.0F);
      reducer.gather_gradients(whole.arrays);
      for (std::size_t p = 0; p < means.size(); ++p) {
        Values want = means[p];
        for (float& value : want) value = round_to(dtype, value);
        expect_same_bits(decoded(whole.memory[p], dtype), want, step.parameters[p].name);
      }
    }
    // The shards are untouched. A subset of the arrays may be gathered alone.
    WholeArrays whole = whole_arrays(step, Dtype::kF32, 9.0F);
    reducer.gather_gradients(std::span(whole.arrays).subspan(2, 1));
    expect_same_bits(decoded(whole.memory[2], Dtype::kF32), means[2], "one array");
    EXPECT_EQ(decoded(whole.memory[0], Dtype::kF32), Values(15, 9.0F));
  });
}

TEST_P(Gather, ParametersAreFilledInFromEveryOwnersSlice) {
  const StepCase step = this->step();
  run_reducers(GetParam().shape, step, options(), [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kF64}) {
      WholeArrays whole = whole_arrays(step, dtype, -1.0F);
      for (std::size_t p = 0; p < step.parameters.size(); ++p) {
        // The owner's update: each element's index modulo 251, which every dtype holds exactly.
        Values values = decoded(whole.memory[p], dtype);
        const Slice slice = reducer.slice(step.parameters[p].name);
        for (std::int64_t i = slice.offset; i < slice.offset + slice.count; ++i) {
          values[static_cast<std::size_t>(i)] = static_cast<float>(i % 251);
        }
        const std::vector<std::byte> updated = encoded(values, dtype);
        std::copy(updated.begin(), updated.end(), whole.memory[p].begin());
      }
      reducer.gather_parameters(whole.arrays);
      for (std::size_t p = 0; p < step.parameters.size(); ++p) {
        const Values got = decoded(whole.memory[p], dtype);
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(got[i], static_cast<float>(i % 251))
              << step.parameters[p].name << " element " << i << " as " << name(dtype);
        }
      }
    }
  });
}

TEST_P(Gather, RefusesArraysThatDoNotFit) {
  const StepCase step = this->step();
  run_reducers(GetParam().shape, step, options(), [&](Reducer& reducer, const Mesh& mesh) {
    WholeArrays whole = whole_arrays(step, Dtype::kF32, 0.0F);
    EXPECT_THROW(reducer.gather_gradients(whole.arrays), UsageError) << "there is no result";
    run_step(reducer, step, mesh.rank());
    const NamedArray& right = whole.arrays[0];
    const std::int64_t count = right.array.count;
    const std::vector<std::pair<NamedArray, std::string>> wrong{
        {{"unknown", right.array},
         "got an unknown one; use a name as registered, such as '" + right.name + "'"},
        {{right.name, {right.array.data, count - 1, Dtype::kF32}}, ""},
        {{right.name, {nullptr, count, Dtype::kF32}}, ""}};
    for (const auto& [array, message] : wrong) {
      const std::span one(&array, 1);
      EXPECT_THAT(caught<UsageError>([&, one] { reducer.gather_gradients(one); }),
                  says(HasSubstr(message)));
      EXPECT_THAT(caught<UsageError>([&, one] { reducer.gather_parameters(one); }),
                  says(HasSubstr(message)));
    }
    const std::vector<NamedArray> twice{whole.arrays[0], whole.arrays[0]};
    EXPECT_THROW(reducer.gather_gradients(twice), UsageError);
    reducer.gather_gradients(whole.arrays);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, Gather,
    testing::Values(GatherCase{{2, 2}, Layout::kFlat}, GatherCase{{2, 2}, Layout::kDim0},
                    GatherCase{{1, 3}, Layout::kFlat}, GatherCase{{1, 7}, Layout::kDim0},
                    GatherCase{{3, 1}, Layout::kFlat}, GatherCase{{1, 1}, Layout::kDim0},
                    GatherCase{{2, 2}, Layout::kWhole}, GatherCase{{1, 5}, Layout::kWhole},
                    GatherCase{{2, 2}, Layout::kFlat, ShardOver::kMesh},
                    GatherCase{{3, 2}, Layout::kDim0, ShardOver::kMesh},
                    GatherCase{{2, 3}, Layout::kWhole, ShardOver::kMesh},
                    GatherCase{{3, 1}, Layout::kFlat, ShardOver::kMesh},
                    GatherCase{{1, 2}, Layout::kFlat, ShardOver::kMesh}),
    testing::PrintToStringParamName());

// Rows that do not all end together and need more than one message.
TEST(GatherParameters, LongUnitsTakeSeveralMessages) {
  const std::vector<Shape> shapes{{1100, 1001}, {777}, {}, {500, 999}, {3}, {499, 1000}, {250, 7}};
  for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    run_mesh({1, 3}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.layout = layout, .bucket_bytes = 32 << 20});
      std::vector<std::vector<float>> arrays;
      std::vector<NamedArray> named;
      for (const Shape& shape : shapes) {
        reducer.register_parameter({.name = std::to_string(arrays.size()), .shape = shape});
        arrays.emplace_back(static_cast<std::size_t>(element_count(shape)), -1.0F);
      }
      for (std::size_t p = 0; p < shapes.size(); ++p) {
        const std::string name = std::to_string(p);
        const Slice own = reducer.slice(name);
        const auto begin = arrays[p].begin() + own.offset;
        std::iota(begin, begin + own.count, static_cast<float>(own.offset));
        named.push_back({name, {arrays[p].data(), std::ssize(arrays[p]), Dtype::kF32, {}}});
      }
      reducer.prepare();
      reducer.gather_parameters(named);
      for (const std::vector<float>& array : arrays) {
        for (std::size_t i = 0; i < array.size(); ++i) ASSERT_EQ(array[i], static_cast<float>(i));
      }
      // 8 MB in messages of 4 MiB, or the large array alone.
      EXPECT_GE(reducer.stats().all_gather_count, 2) << name(layout);
    });
  }
}

// Gathers parameters with these counts, in this order.
std::vector<std::vector<int>> units_of(Layout kind, std::int64_t bucket_bytes,
                                       std::vector<int> order, std::int64_t unit_bytes) {
  const std::vector<std::int64_t> counts{10, 0, 20, 1 << 18, 30, 256, 1};
  std::vector<LayoutParameter> parameters;
  for (const std::int64_t count : counts) parameters.push_back({.shape = {count}});
  const BucketLayout layout(parameters, 2, kind, bucket_bytes);
  std::vector<reducer::FullArray> arrays;
  for (const int p : order) {
    arrays.push_back({p, {nullptr, counts[static_cast<std::size_t>(p)], Dtype::kF32, {}}});
  }
  std::vector<std::vector<int>> result;
  for (const reducer::GatherUnit& unit : reducer::gather_units(layout, arrays, unit_bytes)) {
    result.emplace_back();
    for (const reducer::FullArray& full : unit) result.back().push_back(full.parameter);
  }
  return result;
}

TEST(GatherUnits, JoinSmallArraysAndLeaveLargeOnesAlone) {
  const std::vector<std::vector<int>> alone{{0, 2, 4}, {3}, {5}, {6}};
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6};
  EXPECT_EQ(units_of(Layout::kFlat, 4, all, 1 << 10), alone);
  EXPECT_EQ(units_of(Layout::kDim0, 4 << 20, all, 1 << 10), alone);
  EXPECT_TRUE(units_of(Layout::kFlat, 4, {}, 1 << 10).empty());
}

// A rank may own all of an array that shares a message with others: it would be the only sender.
TEST(GatherUnits, DivideNoJoin) {
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6};
  EXPECT_THAT(units_of(Layout::kFlat, 4 << 20, all, 1), ElementsAre(ElementsAre(0, 2, 3, 4, 5, 6)));
  const std::vector<int> mixed{3, 6, 4, 2, 1, 0, 5};
  // A message holds at most 256 bytes: arrays 3 and 5 are larger.
  EXPECT_THAT(units_of(Layout::kFlat, 256, mixed, 1),
              ElementsAre(ElementsAre(3), ElementsAre(6, 4, 2, 0), ElementsAre(5)));
}

// An optimizer asks thousands of times while it sets itself up, before there are buckets.
TEST(SliceBeforeTheFirstStep, IsTheOneOfTheStep) {
  constexpr int kParameters = 4'000;
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh, {.missing = Missing::kZero});
    const auto name_of = [](int p) { return "w" + std::to_string(p); };
    for (int p = 0; p < kParameters; ++p) {
      reducer.register_parameter({.name = name_of(p), .shape = {3 + p % 5, 7}});
    }
    const std::int64_t before_the_last = reducer.slice("w0").count;
    reducer.register_parameter({.name = "last", .shape = {5}});
    EXPECT_EQ(reducer.slice("w0").count, before_the_last);
    std::vector<Slice> early;
    for (int p = 0; p < kParameters; ++p) early.push_back(reducer.slice(name_of(p)));
    early.push_back(reducer.slice("last"));
    reducer.begin_microbatch({.last = true});
    reducer.end_microbatch();
    for (int p = 0; p <= kParameters; ++p) {
      const Slice slice = reducer.slice(p < kParameters ? name_of(p) : "last");
      EXPECT_EQ(slice.offset, early[static_cast<std::size_t>(p)].offset);
      EXPECT_EQ(slice.count, early[static_cast<std::size_t>(p)].count);
    }
  });
}

}  // namespace
}  // namespace hsdp
