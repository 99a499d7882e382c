// Gathers of updated parameters: what arrives, masters that are rounded on the way, who waits, and
// what is refused. tests/reducer/gather_lane_test.cpp has them under microbatches.
#include "zero/parameter_gather.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"
#include "tests/zero/sliced_parameters.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;
using zero::GatheredParameter;
using zero::ParameterGather;

using Masters = SlicedParameters::Masters;

// Before the first gather.
Values stale(const ParameterSpec& spec) {
  return Values(static_cast<std::size_t>(element_count(spec.shape)), -1.0F);
}
// What an optimizer leaves in step `step`: the same for every replica.
Values updated(const SlicedParameters& parameters, std::size_t p, int step) {
  return random_values(element_count(parameters.specs()[p].shape), Dtype::kF32,
                       1000 * static_cast<std::uint64_t>(step) + p, {-8, 8});
}
void update(SlicedParameters& parameters, int step) {
  for (std::size_t p = 0; p < parameters.specs().size(); ++p) {
    parameters.update(p, updated(parameters, p, step));
  }
}
void expect(const SlicedParameters& parameters, int step, const std::string& label) {
  for (std::size_t p = 0; p < parameters.specs().size(); ++p) {
    parameters.expect(p, updated(parameters, p, step), label);
  }
}

struct GatherCase {
  MeshShape shape;
  Layout layout = Layout::kFlat;
};

void PrintTo(const GatherCase& row, std::ostream* out) {
  *out << to_string(row.shape) << "_" << name(row.layout);
}

class Gather : public testing::TestWithParam<GatherCase> {};

TEST_P(Gather, CompletesWhatEachRankHasUpdated) {
  const auto& [shape, layout] = GetParam();
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t unit_bytes : {1, 64, 1 << 20}) {
      for (const Masters masters : {Masters::kNone, Masters::kOfAll}) {
        run_mesh(shape, [&](const Mesh& mesh) {
          Reducer reducer(mesh, {.layout = layout, .bucket_bytes = 512});
          SlicedParameters parameters(reducer, odd_parameters(dtype), masters, stale);
          ParameterGather gather(reducer, parameters.gathered(), unit_bytes);
          EXPECT_TRUE(gather.ready(0).complete()) << "nothing was started";
          for (int step = 0; step < 3; ++step) {
            Stream writer = Stream::inline_host();
            gather.fence(writer);
            update(parameters, step);
            gather.start_all(writer.record());
            gather.wait("odd");
            parameters.expect(1, updated(parameters, 1, step), "the one that was waited for");
            gather.wait_all();
            expect(parameters, step,
                   masters == Masters::kOfAll ? "rounded from masters" : "in place");
          }
          const std::int64_t count = mesh.shard_size() == 1 ? 0 : 3 * gather.unit_count();
          EXPECT_EQ(gather.stats().gather_count, count);
          EXPECT_GE(gather.stats().exposed_s, 0.0);
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, Gather,
                         testing::Values(GatherCase{{1, 1}}, GatherCase{{1, 2}}, GatherCase{{1, 3}},
                                         GatherCase{{2, 2}}, GatherCase{{2, 1}},
                                         GatherCase{{1, 3}, Layout::kDim0},
                                         GatherCase{{1, 3}, Layout::kWhole}),
                         testing::PrintToStringParamName());

TEST(ParameterGather, HasEveryElementInOneUnit) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 512});
    std::vector<ParameterSpec> specs = odd_parameters(Dtype::kF32);
    specs.push_back({.name = "huge", .shape = {1 << 18}});  // 1 MiB: alone
    SlicedParameters parameters(reducer, specs, Masters::kNone, stale);
    const ParameterGather gather(reducer, parameters.gathered(), 1 << 10);
    std::vector<int> seen;
    for (int u = 0; u < gather.unit_count(); ++u) {
      seen.insert(seen.end(), gather.unit(u).begin(), gather.unit(u).end());
    }
    EXPECT_THAT(seen, testing::UnorderedElementsAre(0, 1, 2, 4, 5)) << "all but the empty one";
    for (int u = 0; u < gather.unit_count(); ++u) {
      const std::vector<int>& unit = gather.unit(u);
      EXPECT_TRUE(std::ranges::count(unit, 5) == 0 || unit.size() == 1) << "a large one is alone";
    }
    EXPECT_TRUE(gather.ready(3).complete());
  });
}

// One message at a time: small parameters together, a large one by itself and without any.
TEST(ParameterGather, HoldsItsLargestMessageWhileItGathers) {
  for (const MeshShape shape : {MeshShape{1, 2}, MeshShape{2, 1}}) {
    run_mesh(shape, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      std::vector<ParameterSpec> specs = odd_parameters(Dtype::kBf16);
      specs.push_back({.name = "huge", .shape = {1 << 19}, .dtype = Dtype::kBf16});  // 1 MiB
      SlicedParameters parameters(reducer, specs, Masters::kOfAll, stale);
      ParameterGather gather(reducer, parameters.gathered(), 1 << 20);
      std::int64_t message = 0;
      for (int u = 0; u < gather.unit_count(); ++u) {
        std::int64_t bytes = 0;
        for (const int p : gather.unit(u)) {
          bytes += 2 * element_count(specs[static_cast<std::size_t>(p)].shape);
        }
        if (gather.unit(u).size() > 1) message = std::max(message, bytes);
      }
      ASSERT_GT(message, 0);
      for (int step = 0; step < 2; ++step) {
        update(parameters, step);
        gather.start_all({});
        gather.wait_all();
        EXPECT_EQ(reducer.stats().parameter_gather_bytes, 0) << "given back";
      }
      EXPECT_EQ(reducer.memory_count().of(MemoryKind::kParameterGather).peak,
                mesh.shard_size() > 1 ? message : 0);
    });
  }
}

// Whoever waits is held up until the update is there; nobody else is.
TEST(ParameterGather, WaitsForTheUpdate) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedParameters parameters(reducer, odd_parameters(Dtype::kBf16), Masters::kOfAll, stale);
    ParameterGather gather(reducer, parameters.gathered());
    std::promise<void> may_write;
    Stream writer = Stream::host_worker("writer");
    writer.run([&] {
      may_write.get_future().wait();
      update(parameters, 7);
    });
    gather.start_all(writer.record());
    EXPECT_FALSE(gather.ready(0).complete());
    std::future<void> reader = std::async(std::launch::async, [&] { gather.wait(2); });
    EXPECT_EQ(reader.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
    may_write.set_value();
    reader.get();
    parameters.expect(2, updated(parameters, 2, 7), "read by another thread");
    gather.wait_all();
    EXPECT_GT(gather.stats().exposed_s, 0.0);
  });
}

// What one rank gets wrong is its own error, the others hear of it, and all may try again.
TEST(ParameterGather, RefusesWhatDoesNotFit) {
  struct Fault {
    std::function<void(std::vector<GatheredParameter>& parameters)> make;
    std::string text;
    std::int64_t unit_bytes = 1 << 10;
  };
  static float few = 0;
  const std::vector<Fault> faults{
      {[](auto& p) { p[1].name = "unknown"; }, "'unknown': expected a registered parameter"},
      {[](auto& p) { p[1] = p[0]; }, "'rows': expected every parameter once"},
      {[](auto& p) { p[1].array.count = 3; }, "expected 7 elements, got 3"},
      {[](auto& p) { p[1].array.data = nullptr; }, "a null pointer"},
      {[](auto& p) {
         p[2].master = {&few, 1, Dtype::kF32, {}};
       },
       "master of 'large'"},
      {[](auto& p) { p[2].master.dtype = Dtype::kBf16; }, "master of 'large'"},
      {[](auto& p) { p[2].array.dtype = Dtype::kI64; }, "expected an array of f32, bf16 or f16"},
      {[](auto&) {}, "unit_bytes of at least 1", 0},
  };
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedParameters parameters(reducer, odd_parameters(Dtype::kF32), Masters::kOfAll, stale);
    for (const Fault& fault : faults) {
      std::vector<GatheredParameter> given = parameters.gathered();
      std::int64_t unit_bytes = 1 << 10;
      if (mesh.rank() == 1) {
        fault.make(given);
        unit_bytes = fault.unit_bytes;
      }
      const auto make = [&] { const ParameterGather gather(reducer, given, unit_bytes); };
      if (mesh.rank() == 1) {
        const auto error = caught<UsageError>(make);
        ASSERT_TRUE(error) << fault.text;
        EXPECT_THAT(error->what(), HasSubstr(fault.text));
      } else {
        const auto error = caught<StepAbortedError>(make);
        ASSERT_TRUE(error) << fault.text;
        EXPECT_EQ(error->ranks(), std::vector<int>{1});
      }
    }
    ParameterGather gather(reducer, parameters.gathered());
    EXPECT_THAT([&] { gather.wait("unknown"); },
                testing::ThrowsMessage<UsageError>(HasSubstr("'unknown'")));
    for (const int number : {-1, 99}) {
      const auto refused = [&](const std::string& what, const std::function<void()>& call) {
        EXPECT_THAT(call, testing::ThrowsMessage<UsageError>(
                              HasSubstr("zero: parameter gather: expected " + what + " below ")));
      };
      Stream stream = Stream::inline_host();
      refused("a unit", [&] { static_cast<void>(gather.unit(number)); });
      refused("a unit", [&] { gather.start(number, {}); });
      refused("a parameter index", [&] { static_cast<void>(gather.ready(number)); });
      refused("a parameter index", [&] { gather.wait(number); });
      refused("a parameter index", [&] { gather.wait(number, stream); });
      refused("a parameter index", [&] { gather.rebind(number, {}); });
    }
    gather.wait(0);  // nothing was started
    update(parameters, 1);
    gather.start_all({});
    gather.wait_all();
    expect(parameters, 1, "after all that");
  });
}

TEST(ParameterGather, IsAgreedOnByAllRanks) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedParameters parameters(reducer, odd_parameters(Dtype::kF32), Masters::kNone, stale);
    std::vector<GatheredParameter> given = parameters.gathered();
    if (mesh.rank() == 1) std::swap(given[0], given[1]);
    const auto make = [&] { const ParameterGather gather(reducer, given); };
    EXPECT_THAT(make, testing::ThrowsMessage<MismatchError>(
                          testing::AllOf(HasSubstr("expected 'rows' f32 on every rank"),
                                         HasSubstr("got 'odd' f32 on rank 1 of 2"))));
  });
}

}  // namespace
}  // namespace hsdp
