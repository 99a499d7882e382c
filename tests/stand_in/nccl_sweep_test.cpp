// A sweep over seeds: the Reducer on the NCCL engine with streams that work late, allocations that
// fail and peers that die, each anywhere. Nobody hangs, nobody takes garbage for a result, and no
// rank goes on where another one stopped. HSDP_SWEEP_SEEDS says how many seeds.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stand_in.h"
#include "hsdp/error.h"
#include "nccl_gpu_rank.h"
#include "quant/loco_hop.h"

namespace hsdp::test {
namespace {

using stand_in::allocation_count;
using stand_in::fail_allocation;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::uint64_t seed_count() {
  const char* const text = std::getenv("HSDP_SWEEP_SEEDS");
  return text == nullptr ? 20 : std::strtoull(text, nullptr, 10);
}

// What a seed decides.
struct Sweep {
  explicit Sweep(std::uint64_t seed) : random(seed) {
    shape = pick<MeshShape>({{1, 2}, {2, 1}, {2, 2}, {1, 3}});
    options.bucket_bytes = pick<std::int64_t>({512, kSmallBuckets, 1 << 20});
    options.layout = pick({Layout::kFlat, Layout::kDim0});
    if (pick({true, false})) options.replica_dtype = pick({Dtype::kF32, Dtype::kBf16});
    loco = options.layout == Layout::kFlat && pick({true, false, false});
    step = random_step(parameters(pick({Dtype::kF32, Dtype::kBf16, Dtype::kF16})), shape.size(),
                       pick<std::vector<Sync>>({{Sync::kAll},
                                                {Sync::kNone, Sync::kShard, Sync::kAll},
                                                {Sync::kShard, Sync::kShard, Sync::kAll},
                                                {Sync::kNone, Sync::kNone, Sync::kAll}}),
                       random());
    delays = random();
  }
  template <typename T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[random() % of.size()];
  }
  [[nodiscard]] ReducerOptions fresh_options() const {
    ReducerOptions fresh = options;
    if (loco) fresh.replica_hop = std::make_shared<quant::LocoHop>(quant::LocoOptions{});
    return fresh;
  }

  std::mt19937_64 random;
  MeshShape shape;
  ReducerOptions options;
  bool loco = false;
  StepCase step;
  std::uint64_t delays = 0;
};

class Seeded : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  void TearDown() override {
    fail_allocation(std::nullopt);
    stand_in::delay_work({});
  }
};

using Results = std::vector<RankResult>;

// A step and everything that is asked of its result.
RankResult run_step_and_read(GpuRank& rank, Reducer& reducer, const Sweep& sweep,
                             const Mesh& mesh) {
  const Device gpu = mesh.device();
  for (std::size_t m = 0; m < sweep.step.schedule.size(); ++m) rank.run_microbatch(m);
  std::vector<float> loss(3, 1.0F);
  mesh.world().all_reduce({.data = {loss.data(), 3, Dtype::kF32, gpu}});
  static_cast<void>(reducer.found_inf());
  static_cast<void>(reducer.grad_norm());
  std::vector<std::vector<float>> memory;  // the stand-in's GPUs use the host's
  std::vector<NamedArray> arrays;
  for (const ParameterSpec& spec : sweep.step.parameters) {
    const std::int64_t count = element_count(spec.shape);
    std::vector<float>& whole = memory.emplace_back(static_cast<std::size_t>(count));
    arrays.push_back({spec.name, {whole.data(), count, Dtype::kF32, gpu}});
  }
  reducer.gather_gradients(arrays);
  return rank.read();  // waits for the gather, too, which uses that memory
}

constexpr int kSteps = 2;

// The steps of one rank with a new Reducer; `steps` gets what was read, also before an error.
void run_steps(const Mesh& mesh, const Sweep& sweep, std::vector<Results>& steps) {
  Reducer reducer(mesh, sweep.fresh_options());
  GpuRank rank(reducer, sweep.step, mesh);
  for (Results& step : steps) {
    step[static_cast<std::size_t>(mesh.rank())] = run_step_and_read(rank, reducer, sweep, mesh);
  }
}

// Of all ranks.
std::vector<Results> no_steps(const Sweep& sweep) {
  return std::vector<Results>(kSteps, Results(static_cast<std::size_t>(sweep.shape.size())));
}

void expect_same(const std::vector<Results>& got, const std::vector<Results>& want,
                 const std::string& label) {
  for (std::size_t s = 0; s < want.size(); ++s) {
    for (std::size_t r = 0; r < want[s].size(); ++r) {
      const std::string rank =
          label + ", step " + std::to_string(s) + ", rank " + std::to_string(r);
      ASSERT_EQ(got[s][r].shards.size(), want[s][r].shards.size()) << rank;
      for (std::size_t p = 0; p < want[s][r].shards.size(); ++p) {
        expect_same_bits(got[s][r].shards[p], want[s][r].shards[p], rank);
      }
    }
  }
}

// What is read where nothing goes wrong, and how much happens.
struct Clean {
  std::vector<Results> steps;
  std::int64_t allocations = 0;
  std::vector<std::size_t> calls;  // of NCCL, by rank
};

Clean run_clean(const Sweep& sweep) {
  Clean clean{.steps = no_steps(sweep)};
  std::int64_t before = 0;
  run_nccl_mesh(sweep.shape, [&](const Mesh& mesh) {
    static_cast<void>(mesh.world().exchange("", "ready"));
    if (mesh.rank() == 0) before = allocation_count();
    static_cast<void>(mesh.world().exchange("", "counted"));
    run_steps(mesh, sweep, clean.steps);
  });
  clean.allocations = allocation_count() - before;
  for (int r = 0; r < sweep.shape.size(); ++r) {
    clean.calls.push_back(nccl_stand_in().calls(r).size());
  }
  return clean;
}

TEST_P(Seeded, StreamsThatWorkLateChangeNoBit) {
  const Sweep sweep(GetParam());
  const Clean clean = run_clean(sweep);
  if (!sweep.loco) {
    expect_reference(clean.steps.back(), sweep.step, sweep.options, sweep.shape, "the clean run");
  }
  stand_in::delay_work(sweep.delays);
  expect_same(run_clean(sweep).steps, clean.steps, "late");
}

TEST_P(Seeded, AFailedAllocationIsAnErrorOfAllRanksOrOfNone) {
  Sweep sweep(GetParam());
  const Clean clean = run_clean(sweep);
  const auto ranks = static_cast<std::size_t>(sweep.shape.size());
  const auto size = static_cast<std::uint64_t>(sweep.shape.size());
  const int device = static_cast<int>(sweep.random() % size);
  const auto of_device = static_cast<std::uint64_t>(clean.allocations) / size;
  const auto failing = static_cast<std::int64_t>(sweep.random() % of_device);
  std::vector<std::string> errors(ranks);
  std::vector<Results> first = no_steps(sweep);
  std::vector<Results> second = no_steps(sweep);
  run_nccl_mesh(sweep.shape,
                [&](const Mesh& mesh) {
                  const auto r = static_cast<std::size_t>(mesh.rank());
                  static_cast<void>(mesh.world().exchange("", "ready"));
                  if (r == 0) fail_allocation({{.after = failing, .device = device}});
                  static_cast<void>(mesh.world().exchange("", "set"));
                  try {
                    run_steps(mesh, sweep, first);
                  } catch (const std::exception& error) {
                    errors[r] = error.what();
                  }
                  static_cast<void>(mesh.world().exchange("", "over"));
                  if (r == 0) fail_allocation(std::nullopt);
                  static_cast<void>(mesh.world().exchange("", "reset"));
                  run_steps(mesh, sweep, second);
                },
                {.timeout = seconds(10)});
  const auto failed = std::ranges::count_if(errors, [](const auto& e) { return !e.empty(); });
  for (std::size_t r = 0; r < ranks; ++r) {
    EXPECT_TRUE(failed == 0 || !errors[r].empty())
        << "allocation " << failing << " of device " << device << ": rank " << r
        << " went on; another: " << *std::ranges::max_element(errors);
  }
  if (failed == 0) expect_same(first, clean.steps, "nothing failed");
  expect_same(second, clean.steps, "after " + errors[0]);
}

bool same_or_nan(float got, float want) {
  return std::isnan(got) || std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(want);
}

// One GPU stops at any of its calls of NCCL, or a rank leaves at any microbatch.
TEST_P(Seeded, APeerThatDiesLeavesNoGarbageAndNobodyHangs) {
  Sweep sweep(GetParam());
  const Clean clean = run_clean(sweep);
  const int dying =
      static_cast<int>(sweep.random() % static_cast<std::uint64_t>(sweep.shape.size()));
  const std::size_t last_call = sweep.random() % clean.calls[static_cast<std::size_t>(dying)];
  stand_in::delay_work(sweep.delays);
  std::vector<Results> steps = no_steps(sweep);
  std::atomic<bool> over = false;
  std::thread killer;
  const auto start = std::chrono::steady_clock::now();
  const auto errors = try_nccl_ranks(
      sweep.shape.size(),
      [&](Communicator& world) {
        if (world.rank() == dying) {
          killer = std::thread([&over, dying, last_call] {
            while (!over && nccl_stand_in().calls(dying).size() <= last_call) {
              std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
            if (!over) nccl_stand_in().hang(dying);
          });
        }
        const Mesh mesh(world, {.replicate = sweep.shape.replicate,
                                .shard = sweep.shape.shard,
                                .device = gpu_of(world.rank())});
        run_steps(mesh, sweep, steps);
        for (const char* const what : {"over", "over again"}) {  // no two ranks part between
          static_cast<void>(mesh.world().exchange("", what));
        }
      },
      {.timeout = milliseconds(700)});
  over = true;
  killer.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20));
  for (std::size_t s = 0; s < steps.size(); ++s) {
    for (std::size_t r = 0; r < steps[s].size(); ++r) {
      const std::vector<Values>& shards = steps[s][r].shards;
      for (std::size_t p = 0; p < shards.size(); ++p) {
        EXPECT_TRUE(std::ranges::equal(shards[p], clean.steps[s][r].shards[p], same_or_nan))
            << "garbage on rank " << r << " in step " << s << ", call " << last_call;
      }
    }
  }
  const auto failed = std::ranges::count_if(errors, [](const auto& e) { return e != nullptr; });
  EXPECT_TRUE(failed == 0 || failed == std::ssize(errors)) << failed << " ranks failed";
}

std::vector<std::uint64_t> seeds() {
  std::vector<std::uint64_t> all(seed_count());
  std::iota(all.begin(), all.end(), std::uint64_t{1});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Sweep, Seeded, ::testing::ValuesIn(seeds()));

}  // namespace
}  // namespace hsdp::test
