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

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;
using zero::GatheredParameter;
using zero::ParameterGather;

// Parameters of a Reducer as whole arrays and fp32 masters of this rank's slices.
class Parameters {
 public:
  Parameters(Reducer& reducer, std::vector<ParameterSpec> specs) : specs_(std::move(specs)) {
    for (const ParameterSpec& spec : specs_) reducer.register_parameter(spec);
    reducer.prepare();
    for (const ParameterSpec& spec : specs_) {
      slices_.push_back(reducer.slice(spec.name));
      arrays_.push_back(encoded(Values(count(spec), -1.0F), spec.dtype));
      masters_.emplace_back(static_cast<std::size_t>(slices_.back().count));
    }
  }

  // What an optimizer leaves in step `step`: the same for every replica.
  [[nodiscard]] Values updated(std::size_t p, int step) const {
    return random_values(static_cast<std::int64_t>(count(specs_[p])), Dtype::kF32,
                         1000 * static_cast<std::uint64_t>(step) + p, {-8, 8});
  }
  void update_masters(int step) {
    for (std::size_t p = 0; p < specs_.size(); ++p) {
      const Values whole = updated(p, step);
      const auto begin = whole.begin() + slices_[p].offset;
      std::copy(begin, begin + slices_[p].count, masters_[p].begin());
    }
  }
  // Without masters: the own slice of the array.
  void update_slices(int step) {
    for (std::size_t p = 0; p < specs_.size(); ++p) {
      Values whole = updated(p, step);
      for (float& value : whole) value = round_to(specs_[p].dtype, value);
      const std::vector<std::byte> bytes = encoded(whole, specs_[p].dtype);
      const auto size = static_cast<std::int64_t>(size_bytes(specs_[p].dtype));
      const auto begin = bytes.begin() + slices_[p].offset * size;
      std::copy(begin, begin + slices_[p].count * size,
                arrays_[p].begin() + slices_[p].offset * size);
    }
  }
  void expect(int step, const std::string& label) const {
    for (std::size_t p = 0; p < specs_.size(); ++p) expect(p, step, label);
  }
  void expect(std::size_t p, int step, const std::string& label) const {
    Values want = updated(p, step);
    for (float& value : want) value = round_to(specs_[p].dtype, value);
    expect_same_bits(decoded(arrays_[p], specs_[p].dtype), want, label + " " + specs_[p].name);
  }

  [[nodiscard]] std::vector<GatheredParameter> gathered(bool with_masters) {
    std::vector<GatheredParameter> all;
    for (std::size_t p = 0; p < specs_.size(); ++p) {
      GatheredParameter& one = all.emplace_back();
      one.name = specs_[p].name;
      one.array = {
          arrays_[p].data(), static_cast<std::int64_t>(count(specs_[p])), specs_[p].dtype, {}};
      if (!with_masters) continue;
      one.master = {masters_[p].data(), slices_[p].count, Dtype::kF32, {}};
    }
    return all;
  }

 private:
  [[nodiscard]] static std::size_t count(const ParameterSpec& spec) {
    return static_cast<std::size_t>(element_count(spec.shape));
  }

  std::vector<ParameterSpec> specs_;
  std::vector<Slice> slices_;
  std::vector<std::vector<std::byte>> arrays_;
  std::vector<Values> masters_;
};

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
      for (const bool with_masters : {false, true}) {
        run_mesh(shape, [&](const Mesh& mesh) {
          Reducer reducer(mesh, {.layout = layout, .bucket_bytes = 512});
          Parameters parameters(reducer, odd_parameters(dtype));
          ParameterGather gather(reducer, parameters.gathered(with_masters), unit_bytes);
          EXPECT_TRUE(gather.ready(0).complete()) << "nothing was started";
          for (int step = 0; step < 3; ++step) {
            Stream writer = Stream::inline_host();
            gather.fence(writer);
            if (with_masters) {
              parameters.update_masters(step);
            } else {
              parameters.update_slices(step);
            }
            gather.start_all(writer.record());
            gather.wait("odd");
            parameters.expect(1, step, "the one that was waited for");
            gather.wait_all();
            parameters.expect(step, with_masters ? "rounded from masters" : "in place");
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
    Parameters parameters(reducer, specs);
    const ParameterGather gather(reducer, parameters.gathered(false), 1 << 10);
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
      Parameters parameters(reducer, specs);
      ParameterGather gather(reducer, parameters.gathered(true), 1 << 20);
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
        parameters.update_masters(step);
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
    Parameters parameters(reducer, odd_parameters(Dtype::kBf16));
    ParameterGather gather(reducer, parameters.gathered(true));
    std::promise<void> updated;
    Stream writer = Stream::host_worker("writer");
    writer.run([&] {
      updated.get_future().wait();
      parameters.update_masters(7);
    });
    gather.start_all(writer.record());
    EXPECT_FALSE(gather.ready(0).complete());
    std::future<void> reader = std::async(std::launch::async, [&] { gather.wait(2); });
    EXPECT_EQ(reader.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
    updated.set_value();
    reader.get();
    parameters.expect(2, 7, "read by another thread");
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
    Parameters parameters(reducer, odd_parameters(Dtype::kF32));
    for (const Fault& fault : faults) {
      std::vector<GatheredParameter> given = parameters.gathered(true);
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
    ParameterGather gather(reducer, parameters.gathered(true));
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
    parameters.update_masters(1);
    gather.start_all({});
    gather.wait_all();
    parameters.expect(1, "after all that");
  });
}

TEST(ParameterGather, IsAgreedOnByAllRanks) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    Parameters parameters(reducer, odd_parameters(Dtype::kF32));
    std::vector<GatheredParameter> given = parameters.gathered(false);
    if (mesh.rank() == 1) std::swap(given[0], given[1]);
    const auto make = [&] { const ParameterGather gather(reducer, given); };
    EXPECT_THAT(make, testing::ThrowsMessage<MismatchError>(
                          testing::AllOf(HasSubstr("expected 'rows' f32 on every rank"),
                                         HasSubstr("got 'odd' f32 on rank 1 of 2"))));
  });
}

}  // namespace
}  // namespace hsdp
