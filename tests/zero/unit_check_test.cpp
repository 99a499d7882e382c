// verify_every beside a UnitGather: parameters of units that differ between ranks are found and
// named before anything is updated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/flipping_gather.h"
#include "tests/support/reducer_step.h"
#include "tests/zero/sliced_parameters.h"
#include "zero/unit_gather.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;
using zero::UnitGather;

constexpr MeshShape kThreeByTwo{3, 2};
constexpr int kUnitCount = 2;

// A layer of one parameter, and one of two whose slices travel together.
std::vector<ParameterSpec> specs_of_units() {
  return {{.name = "early.w", .shape = {100}},
          {.name = "late.w", .shape = {300}, .dtype = Dtype::kBf16},
          {.name = "late.b", .shape = {30}, .dtype = Dtype::kBf16}};
}

std::string unit_of(std::size_t p) { return p == 0 ? "early" : "late"; }

class TwoUnits {
 public:
  TwoUnits(const Mesh& mesh, std::int64_t every)
      : reducer(mesh, {.bucket_bytes = 512, .missing = Missing::kZero, .verify_every = every}),
        parameters(reducer, specs_of_units(), SlicedParameters::Masters::kOfAll,
                   [](const ParameterSpec& spec) {
                     return Values(static_cast<std::size_t>(element_count(spec.shape)), 1.0F);
                   }),
        gather(reducer, units()) {}

  void use(int unit) {
    std::vector<TensorView> arrays{parameters.array(static_cast<std::size_t>(unit))};
    if (unit == 1) arrays.push_back(parameters.array(2));
    gather.gather(unit, std::move(arrays), {});
    gather.wait(unit);
  }
  void use_all() {
    for (int unit = 0; unit < kUnitCount; ++unit) use(unit);
  }
  // A step that this rank trains by `passes`, without gradients.
  void train(const std::function<void()>& passes) {
    Microbatch open(reducer, {.last = true});
    passes();
    gather.end({}).wait();  // other ranks may need this one to reach the end
    open.end();
  }
  void train() {
    train([&] { use_all(); });
  }
  [[nodiscard]] std::optional<MismatchError> update() {
    return caught<MismatchError>([&] { gather.begin_update({}).wait(); });
  }

 private:
  std::vector<zero::ParameterUnit> units() {
    std::vector<zero::ParameterUnit> all{{.name = "early"}, {.name = "late"}};
    for (std::size_t p = 0; p < parameters.specs().size(); ++p) {
      const ParameterSpec& spec = parameters.specs()[p];
      all[p == 0 ? 0 : 1].parameters.push_back(
          {spec.name, spec.dtype, element_count(spec.shape), parameters.own(p)});
    }
    return all;
  }

 public:
  Reducer reducer;
  SlicedParameters parameters;
  UnitGather gather;
};

void flip_sign(TensorView values) {
  auto* const byte = static_cast<unsigned char*>(values.data) + 3;
  *byte = static_cast<unsigned char>(*byte ^ 0x80U);
}

auto at_fault(const std::vector<int>& ranks, std::size_t parameter, const std::string& rank_text) {
  const std::string name = specs_of_units()[parameter].name;
  return names(ranks,
               AllOf(HasSubstr("expected the same '" + name + "' of unit '" + unit_of(parameter)),
                     HasSubstr("got other bits on " + rank_text + " of 6 than on the rest"),
                     HasSubstr("look for a fault of memory")));
}

// A replica whose slice has drifted sends other bits to its shard group.
TEST(UnitCheck, NamesTheParameterAndTheReplicaOfOneFlippedBit) {
  for (int rank = 0; rank < kThreeByTwo.size(); ++rank) {
    for (std::size_t p = 0; p < specs_of_units().size(); ++p) {
      run_mesh(kThreeByTwo, [&](const Mesh& mesh) {
        TwoUnits two(mesh, 2);
        for (int step = 0; step < 3; ++step) {
          two.train();
          EXPECT_EQ(two.update(), std::nullopt);
          EXPECT_EQ(two.update(), std::nullopt) << "which no step has asked for";
        }
        const bool has_elements = two.parameters.own(p).count > 0;
        ASSERT_TRUE(has_elements);
        if (mesh.rank() == rank) flip_sign(two.parameters.own(p));
        two.train();
        const int first = rank / kThreeByTwo.shard * kThreeByTwo.shard;
        const std::string ranks =
            "ranks " + std::to_string(first) + ", " + std::to_string(first + 1);
        EXPECT_THAT(two.update(), at_fault({first, first + 1}, p, ranks));
      });
    }
  }
}

// The first bit of a peer's part of a message is in the unit's first parameter.
TEST(UnitCheck, NamesTheRankOnWhichABitFlippedOnItsWay) {
  for (int rank = 0; rank < kThreeByTwo.size(); ++rank) {
    for (const int unit : {0, 1}) {
      run_ranks(kThreeByTwo.size(), [&](Communicator& world) {
        const auto left = std::make_shared<int>(-1);
        const Communicator faulty(std::make_shared<FlippingGather>(world.engine(), left));
        const Mesh mesh(faulty, MeshOptions{.replicate = 3, .shard = 2});
        TwoUnits two(mesh, 1);
        two.train();
        EXPECT_EQ(two.update(), std::nullopt);
        two.train([&] {
          if (mesh.rank() == rank) *left = unit;
          two.use_all();
        });
        EXPECT_THAT(two.update(), at_fault({rank}, static_cast<std::size_t>(unit),
                                           "rank " + std::to_string(rank)));
      });
    }
  }
}

TEST(UnitCheck, OnlyLooksAtEveryNthStep) {
  run_mesh(kThreeByTwo, [](const Mesh& mesh) {
    TwoUnits two(mesh, 3);
    for (int step = 0; step < 5; ++step) {
      const bool flips = mesh.rank() == 1 && step != 2;
      if (flips) flip_sign(two.parameters.own(0));
      two.train();
      if (flips) flip_sign(two.parameters.own(0));
      EXPECT_EQ(two.update(), std::nullopt) << step;
    }
  });
}

// As that is what the last backward pass used.
TEST(UnitCheck, LooksAtAUnitsLastGather) {
  for (const MeshShape shape : {kThreeByTwo, MeshShape{3, 1}}) {
    for (const bool is_last : {false, true}) {
      run_mesh(shape, [&](const Mesh& mesh) {
        TwoUnits two(mesh, 1);
        two.train([&] {
          for (const bool flips : {!is_last, is_last}) {
            if (mesh.rank() == 1 && flips) flip_sign(two.parameters.own(1));
            two.use_all();
            two.gather.end({}).wait();
            if (mesh.rank() == 1 && flips) flip_sign(two.parameters.own(1));
          }
        });
        const auto error = two.update();
        EXPECT_EQ(error.has_value(), is_last);
        if (!error) return;
        EXPECT_THAT(error->what(), HasSubstr("'late.w' of unit 'late' on all ranks before step 0"));
      });
    }
  }
}

// A step that is dropped leaves digests of values that all ranks may then change.
TEST(UnitCheck, ForgetsADroppedStep) {
  run_mesh(kThreeByTwo, [](const Mesh& mesh) {
    TwoUnits two(mesh, 1);
    try {
      Microbatch open(two.reducer, {.last = true});
      two.use_all();
      two.gather.end({}).wait();
      if (mesh.rank() == 3) throw std::runtime_error("the test wants it");
      open.end();
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(ReducerInternal(two.reducer).take_drop().has_value(), mesh.rank() != 3);
    two.parameters.update(0, Values(100, 5.0F));
    two.train([&] {
      if (mesh.rank() / mesh.shard_size() != 1) two.use_all();
    });
    EXPECT_EQ(two.update(), std::nullopt);
  });
}

// Units in another order and number, some on no rank of a replica, in several passes, and outside
// of steps, where slices change.
TEST(UnitCheck, RanksMayGatherDifferently) {
  for (const MeshShape shape : {MeshShape{2, 2}, MeshShape{4, 1}, MeshShape{1, 4}, kThreeByTwo}) {
    for (std::uint32_t seed = 0; seed < 10; ++seed) {
      run_mesh(shape, [&](const Mesh& mesh) {
        TwoUnits two(mesh, 1 + seed % 2);
        std::mt19937 random(100 * seed + static_cast<std::uint32_t>(mesh.rank()));
        const auto use_some = [&] {
          for (auto left = random() % 5; left > 0; --left) {
            two.use(static_cast<int>(random() % kUnitCount));
          }
        };
        const auto set_all = [&](int value) {
          for (std::size_t p = 0; p < specs_of_units().size(); ++p) {
            two.parameters.update(p, Values(300, static_cast<float>(value)));
          }
        };
        for (int step = 0; step < 5; ++step) {
          if (step % 2 == 1 && mesh.rank() < mesh.shard_size()) {  // an evaluation of an average
            set_all(100);
            use_some();
            two.gather.end({}).wait();
          }
          set_all(2 * step);  // a checkpoint that is loaded
          two.train([&] {
            use_some();
            two.gather.end({}).wait();
            use_some();
          });
          EXPECT_EQ(two.update(), std::nullopt);
          set_all(2 * step + 1);
        }
      });
    }
  }
}

TEST(UnitCheck, CostsAMessageWhereItLooks) {
  run_mesh(kThreeByTwo, [](const Mesh& mesh) {
    std::vector<std::int64_t> sent;
    for (const std::int64_t every : {0, 100, 1}) {
      TwoUnits two(mesh, every);
      std::int64_t least = std::numeric_limits<std::int64_t>::max();
      for (int update = 0; update < 10; ++update) {  // the first ones learn the order
        two.train();
        const std::int64_t before = two.reducer.stats().control_message_count;
        EXPECT_EQ(two.update(), std::nullopt);
        least = std::min(least, two.reducer.stats().control_message_count - before);
      }
      sent.push_back(least);
    }
    if (mesh.rank() != 5) return;  // rank 0 relays
    EXPECT_EQ(sent[1], sent[0]);
    EXPECT_EQ(sent[2], sent[0] + 1);
  });
}

}  // namespace
}  // namespace hsdp
