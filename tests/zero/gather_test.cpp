// Gathers of updated parameters, as the arrays they are slices of or in units: what arrives,
// masters that are rounded on the way, who waits, ranks that ask for different units, and refused
// input. tests/reducer/gather_lane_test.cpp covers gathers under microbatches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/reducer_step.h"
#include "tests/zero/sliced_parameters.h"
#include "zero/parameter_gather.h"
#include "zero/round_records.h"
#include "zero/unit_gather.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;
using zero::GatheredParameter;
using zero::ParameterGather;
using zero::ParameterUnit;
using zero::RoundRecords;
using zero::UnitGather;
using zero::UnitParameter;
using Masters = SlicedParameters::Masters;

struct GatherCase {
  MeshShape shape;
  Layout layout = Layout::kFlat;
  ShardOver shard_over = ShardOver::kShard;
};

void PrintTo(const GatherCase& row, std::ostream* out) {
  *out << to_string(row.shape) << "_" << name(row.layout) << "_" << word_of(row.shard_over);
}

const auto kMeshCases = testing::Values(GatherCase{{2, 2}, Layout::kFlat, ShardOver::kMesh},
                                        GatherCase{{3, 1}, Layout::kFlat, ShardOver::kMesh},
                                        GatherCase{{1, 2}, Layout::kFlat, ShardOver::kMesh},
                                        GatherCase{{2, 3}, Layout::kDim0, ShardOver::kMesh},
                                        GatherCase{{2, 2}, Layout::kWhole, ShardOver::kMesh});
const auto kGatherCases = testing::Values(
    GatherCase{{1, 1}}, GatherCase{{1, 2}}, GatherCase{{1, 3}}, GatherCase{{2, 2}},
    GatherCase{{2, 1}}, GatherCase{{1, 3}, Layout::kDim0}, GatherCase{{1, 3}, Layout::kWhole});

// A mistake on rank 1 alone: rank 1 gets its own error, the other ranks are told.
void expect_fault(const Mesh& mesh, const std::string& text, const std::function<void()>& call) {
  SCOPED_TRACE(text);
  if (mesh.rank() == 1) {
    EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(text)));
  } else {
    const auto error = caught<StepAbortedError>(call);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->ranks(), std::vector<int>{1});
  }
}

// Before the first gather.
Values stale(const ParameterSpec& spec) {
  return Values(static_cast<std::size_t>(element_count(spec.shape)), -1.0F);
}
// What an optimizer writes in step `step`: the same for every replica.
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

class Gather : public testing::TestWithParam<GatherCase> {};

TEST_P(Gather, CompletesWhatEachRankHasUpdated) {
  const auto& [shape, layout, shard_over] = GetParam();
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t unit_bytes : {1, 64, 1 << 20}) {
      for (const Masters masters : {Masters::kNone, Masters::kOfAll}) {
        run_mesh(shape, [&, layout = layout, shard_over = shard_over](const Mesh& mesh) {
          Reducer reducer(mesh, {.layout = layout, .bucket_bytes = 512, .shard_over = shard_over});
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
          const bool over_replicas = shard_over == ShardOver::kMesh && mesh.replicate_size() > 1;
          const int of_unit = (over_replicas ? 1 : 0) + (mesh.shard_size() > 1 ? 1 : 0);
          const std::int64_t most = std::int64_t{3} * gather.unit_count() * of_unit;
          if (over_replicas && layout != Layout::kFlat) {  // some ranks have no elements of a unit
            EXPECT_LE(gather.stats().gather_count, most);
          } else {
            EXPECT_EQ(gather.stats().gather_count, most);
          }
          EXPECT_GE(gather.stats().exposed_s, 0.0);
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, Gather, kGatherCases, testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(OverTheMesh, Gather, kMeshCases, testing::PrintToStringParamName());

TEST(ParameterGather, HasEveryElementInOneUnit) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 512});
    std::vector<ParameterSpec> specs = odd_parameters(Dtype::kF32);
    specs.push_back({.name = "huge", .shape = {1 << 18}});  // 1 MiB: sent alone
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

// One message at a time: small parameters share one, a large one needs none.
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
      EXPECT_EQ(ReducerInternal(reducer).memory_count().of(MemoryKind::kParameterGather).peak,
                mesh.shard_size() > 1 ? message : 0);
    });
  }
}

// A thread that waits is blocked until the update is there; no other thread is.
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

// All ranks may try again.
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
      {[](auto& p) { p[2].array.dtype = Dtype::kI64; },
       "expected an array of f32, bf16, f16 or f64"},
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
      expect_fault(mesh, fault.text,
                   [&] { const ParameterGather gather(reducer, given, unit_bytes); });
    }
    ParameterGather gather(reducer, parameters.gathered());
    EXPECT_THAT([&] { gather.wait("unknown"); }, ThrowsMessage<UsageError>(HasSubstr("'unknown'")));
    for (const int number : {-1, 99}) {
      const auto refused = [&](const std::string& what, const std::function<void()>& call) {
        EXPECT_THAT(call, ThrowsMessage<UsageError>(
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
    EXPECT_THAT(make,
                ThrowsMessage<MismatchError>(AllOf(HasSubstr("expected 'rows' f32 on every rank"),
                                                   HasSubstr("got 'odd' f32 on rank 1 of 2"))));
  });
}

// Units of parameters of which this rank keeps slices: every unit has the same ones, and one that
// the Reducer does not know.
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

  // What an optimizer writes in step `step`.
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
  // Arrays of a unit, filled with other values.
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
    std::vector<std::byte> stored;  // does not move
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

class Units : public testing::TestWithParam<GatherCase> {};

TEST_P(Units, AreWholeWhenTheyWereWaitedFor) {
  constexpr int kUnits = 3;
  const auto& [shape, layout, shard_over] = GetParam();
  ASSERT_EQ(shard_over, ShardOver::kShard);
  for (const Dtype dtype : kDtypes) {
    for (const bool has_masters : {true, false}) {
      run_mesh(shape, [&, layout = layout](const Mesh& mesh) {
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
          gather.begin_update({}).wait();
        }
        // The small parameters of a unit share a message.
        EXPECT_EQ(gather.stats().gather_count, mesh.shard_size() == 1 ? 0 : 3 * kUnits);
      });
    }
  }
}

TEST_P(Units, MayDifferBetweenRanks) {
  constexpr int kUnits = 4;
  const auto& [shape, layout, shard_over] = GetParam();
  ASSERT_EQ(shard_over, ShardOver::kShard);
  run_mesh(shape, [&, layout = layout](const Mesh& mesh) {
    Reducer reducer(mesh, {.layout = layout, .bucket_bytes = 512});
    SlicedUnits sliced(reducer, Dtype::kBf16, kUnits);
    UnitGather gather(reducer, sliced.units());
    std::mt19937 random(static_cast<unsigned>(mesh.rank()));
    for (int step = 0; step < 6; ++step) {
      sliced.update(step);
      // In some steps rank 0 asks for nothing.
      const int count = mesh.rank() == 0 && step % 2 == 0 ? 0 : static_cast<int>(random() % 9);
      for (int i = 0; i < count; ++i) {
        const int unit = static_cast<int>(random() % kUnits);
        gather.gather(unit, sliced.arrays(unit), {});
        gather.wait(unit);
        sliced.expect(unit, "round " + std::to_string(i) + " of step " + std::to_string(step));
        if (random() % 4 == 0) gather.end({}).wait();  // a different number of times on each rank
      }
      gather.begin_update({}).wait();
    }
  });
}

// All ranks repeat a program, but now and then some skip a unit of it, use one twice, ask for any
// unit, or end early. Every rank gets what it asked for, and none waits for a gather that never
// comes.
void run_program(const Mesh& mesh, std::uint64_t seed) {
  std::mt19937 common(static_cast<unsigned>(seed));
  std::mt19937 own(static_cast<unsigned>(seed * 31 + static_cast<std::uint64_t>(mesh.rank())));
  const int unit_count = 2 + static_cast<int>(common() % 4);
  Reducer reducer(mesh, {.bucket_bytes = 512});
  SlicedUnits sliced(reducer, Dtype::kBf16, unit_count);
  UnitGather gather(reducer, sliced.units());
  std::vector<std::vector<int>> programs(1 + common() % 2);
  for (std::vector<int>& program : programs) {
    for (std::size_t n = common() % 10; program.size() < n;) {
      program.push_back(static_cast<int>(common() % static_cast<unsigned>(unit_count)));
    }
  }
  const auto use = [&](int unit) {
    gather.wait(unit);  // its arrays may be used for something else now
    gather.gather(unit, sliced.arrays(unit), {});
    if (own() % 3 == 0) return;  // gathered ahead of its use
    gather.wait(unit);
    sliced.expect(unit, "seed " + std::to_string(seed));
  };
  for (int step = 0; step < 6; ++step) {
    sliced.update(step);
    for (const std::vector<int>& program : programs) {
      const bool differs = own() % 4 == 0;
      for (const int unit : program) {
        const auto choice = differs ? own() % 12 : 11;
        if (choice == 0) continue;
        if (choice == 1) use(unit);
        if (choice == 2) use(static_cast<int>(own() % static_cast<unsigned>(unit_count)));
        if (choice == 3) break;
        use(unit);
      }
      if (!differs || own() % 2 == 0) gather.end({}).wait();
    }
    gather.begin_update({}).wait();
  }
}

TEST(UnitGather, ServesRandomProgramsAndRanksThatLeaveThem) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const int size = 2 + static_cast<int>(seed % 3);
    run_mesh({1, size}, [seed](const Mesh& mesh) { run_program(mesh, seed); });
  }
}

// One word for what a pass begins with, and one for its end, also after a rank has left the record.
TEST(UnitGather, AsksAsOftenForManyUnitsAsForFew) {
  std::vector<std::vector<std::int64_t>> sent;  // in each step, for each number of units
  for (const int unit_count : {2, 40}) {
    sent.emplace_back();
    run_mesh({1, 3}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.bucket_bytes = 512});
      SlicedUnits sliced(reducer, Dtype::kF32, unit_count);
      UnitGather gather(reducer, sliced.units());
      for (int step = 0; step < 8; ++step) {
        const std::int64_t before = reducer.stats().control_message_count;
        for (int pass = 0; pass < 2; ++pass) {
          for (int u = 0; u < unit_count; ++u) {
            const bool skips = step == 3 && pass == 1 && mesh.rank() == 1 && u == unit_count / 2;
            if (skips) continue;
            gather.gather(u, sliced.arrays(u), {});
            gather.wait(u);
            sliced.expect(u, "step " + std::to_string(step));
          }
          gather.end({}).wait();
        }
        gather.begin_update({}).wait();
        if (mesh.rank() == 1) {
          sent.back().push_back(reducer.stats().control_message_count - before);
        }
      }
    });
  }
  EXPECT_GT(sent[1][0], sent[0][0]) << "they ask in the first pass";
  for (std::size_t step = 1; step < sent[0].size(); ++step) {
    EXPECT_EQ(sent[0][step], 5) << step;
    EXPECT_EQ(sent[1][step], 5) << step;
  }
}

// What the ranks want in a pass: this rank wants `wants`. `same`: so do all others.
void run_pass(RoundRecords& records, const std::vector<int>& wants, bool same,
              bool departs = false) {
  records.begin(wants.front());
  for (const int unit : wants) records.want(unit);
  if (departs) records.depart();
  records.end(same);
}

std::vector<int> coming_after(RoundRecords records, int first) {
  records.begin(first);
  const auto coming = records.coming();
  return {coming.begin(), coming.end()};
}

TEST(RoundRecords, FollowWhatAllWantedAfterTheSamePassAndFirstUnit) {
  RoundRecords records;
  EXPECT_THAT(coming_after(records, 0), testing::IsEmpty());
  run_pass(records, {0, 1, 2}, true);
  EXPECT_THAT(coming_after(records, 0), testing::ElementsAre(1, 2));
  EXPECT_THAT(coming_after(records, 1), testing::IsEmpty());
  run_pass(records, {0, 2}, true);  // the passes take turns
  run_pass(records, {0, 1, 2}, true);
  EXPECT_THAT(coming_after(records, 0), testing::ElementsAre(2));
  run_pass(records, {0, 2}, true);
  EXPECT_THAT(coming_after(records, 0), testing::ElementsAre(1, 2));
}

TEST(RoundRecords, StayWhereARankSkipsAndGoWhereOneWantsMore) {
  RoundRecords records;
  run_pass(records, {0, 1, 2}, true);
  run_pass(records, {0, 2}, false);
  EXPECT_THAT(coming_after(records, 0), testing::ElementsAre(1, 2));
  run_pass(records, {0, 1, 2, 0}, false, true);
  EXPECT_THAT(coming_after(records, 0), testing::IsEmpty());
  run_pass(records, {0, 1, 2}, true);
  EXPECT_THAT(coming_after(records, 0), testing::ElementsAre(1, 2));
}

TEST(RoundRecords, ForgetPassesWithoutEndAndTooManyKinds) {
  RoundRecords records;
  run_pass(records, std::vector<int>(5'000, 1), true);
  EXPECT_THAT(coming_after(records, 1), testing::IsEmpty());
  for (int kind = 0; kind < 1'000; ++kind) run_pass(records, {0, kind}, true);
  EXPECT_THAT(coming_after(records, 0), testing::ElementsAre(999));
  for (int round = 0; round < 2; ++round) {  // no more than are kept
    for (int kind = 0; kind < 64; ++kind) run_pass(records, {0, kind}, true);
  }
  for (int kind = 0; kind < 64; ++kind) {
    EXPECT_THAT(coming_after(records, 0), testing::ElementsAre(kind));
    run_pass(records, {0, kind}, true);
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, Units, kGatherCases, testing::PrintToStringParamName());

// Several ranks that want the same unit in one round share its gather.
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
    gather.end({}).wait();
    EXPECT_EQ(gather.stats().gather_count, 1);
    const int wanted = mesh.rank() == 2 ? 1 : 0;
    gather.gather(wanted, sliced.arrays(wanted), {});
    gather.end({}).wait();
    EXPECT_EQ(gather.stats().gather_count, 3) << "two wanted one, and one the other";
    EXPECT_EQ(reducer.stats().parameter_gather_bytes, 0) << "scratch is given back";
  });
}

// The other groups take part in the rounds only.
TEST(UnitGather, GathersInAGroupWhatItsRanksWant) {
  run_mesh({2, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    SlicedUnits sliced(reducer, Dtype::kF32, 2);
    UnitGather gather(reducer, sliced.units());
    const int wanted = mesh.rank() / 2;  // of this group
    for (int pass = 0; pass < 3; ++pass) {
      gather.gather(wanted, sliced.arrays(wanted), {});
      gather.wait(wanted);
      sliced.expect(wanted, "in a group");
      gather.end({}).wait();
    }
    EXPECT_EQ(gather.stats().gather_count, 3);
  });
}

// A large parameter is gathered straight into its array.
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
    gather.end({}).wait();
  });
}

// All ranks may try again.
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
      expect_fault(mesh, fault.text, [&] { const UnitGather gather(reducer, given); });
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
    gather.end({}).wait();
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

// No rank hangs when one neither asks nor ends, whether the record foretold the round or not.
TEST(UnitGather, NamesTheUnitAndTheRankThatDoesNotCome) {
  for (const int passes_before : {0, 2}) {
    std::atomic<bool> gave_up = false;
    run_mesh({1, 2},
             [&](const Mesh& mesh) {
               Reducer reducer(mesh);
               SlicedUnits sliced(reducer, Dtype::kF32, 2);
               UnitGather gather(reducer, sliced.units());
               for (int pass = 0; pass < passes_before; ++pass) {
                 for (const int unit : {0, 1}) gather.gather(unit, sliced.arrays(unit), {});
                 gather.end({}).wait();
               }
               if (passes_before > 0) {
                 gather.gather(0, sliced.arrays(0), {});
                 gather.wait(0);
               }
               if (mesh.rank() == 1) {
                 gave_up.wait(false);
                 EXPECT_THROW(gather.end({}).wait(), TimeoutError) << "what the other one said";
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
}

}  // namespace
}  // namespace hsdp
