// A sweep over seeds: the Reducer on the NCCL engine, with gathers of parameters beside it, streams
// that work late, calls that fail and peers that die, each anywhere. No rank hangs, takes garbage
// for a result, or continues where another one stopped. HSDP_SWEEP_SEEDS sets the number of seeds.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"
#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/error.h"
#include "nccl_ranks.h"
#include "quant/loco_hop.h"
#include "zero/parameter_gather.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::uint64_t seed_count() {
  const char* const text = std::getenv("HSDP_SWEEP_SEEDS");
  return text == nullptr ? 6 : std::strtoull(text, nullptr, 10);
}

// What a seed determines.
struct Sweep {
  explicit Sweep(std::uint64_t seed) : random(seed) {
    shape = pick<MeshShape>({{1, 2}, {2, 1}, {2, 2}, {1, 3}});
    options.bucket_bytes = pick<std::int64_t>({512, kSmallBuckets, 1 << 20});
    options.layout = pick({Layout::kFlat, Layout::kDim0, Layout::kWhole});
    if (pick({true, false})) options.replica_dtype = pick({Dtype::kF32, Dtype::kBf16});
    loco = options.layout != Layout::kDim0 && pick({true, false, false});
    step = random_step(parameters(pick({Dtype::kF32, Dtype::kBf16, Dtype::kF16})), shape.size(),
                       pick<std::vector<Sync>>({{Sync::kAll},
                                                {Sync::kNone, Sync::kShard, Sync::kAll},
                                                {Sync::kShard, Sync::kShard, Sync::kAll},
                                                {Sync::kNone, Sync::kNone, Sync::kAll}}),
                       random());
    delays = random();
    if (pick({true, false})) kept_until = KeptUntil::kOrdered;
    launch_order_counts = pick({true, false});
    gathers = pick({true, false, false});
    host_waits = pick({true, false});
    if (pick({true, false, false})) make_holes();
  }
  void make_holes() {
    options.missing = Missing::kZero;
    for (auto& parameter : step.gradients) {
      for (auto& microbatch : parameter) {
        for (auto& gradient : microbatch) {
          const bool is_kept = &gradient == &parameter[0][0];  // the reference needs one
          if (pick({true, false, false}) && !is_kept) gradient.reset();
        }
      }
    }
  }
  template <typename T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[random() % of.size()];
  }
  [[nodiscard]] int below(std::int64_t count) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(count));
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
  KeptUntil kept_until = KeptUntil::kRead;
  bool launch_order_counts = false;  // NCCL_LAUNCH_ORDER_IMPLICIT is 1
  bool gathers = false;              // zero::ParameterGather runs after each step
  bool host_waits = false;           // for what it gathers; else a stream does
};

class Seeded : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  Seeded() : sweep(GetParam()) {
    if (sweep.launch_order_counts) counts.emplace();
  }
  void TearDown() override {
    stand_in::fail_allocation(std::nullopt);
    stand_in::fail_call(std::nullopt);
    stand_in::fail_kernel(std::nullopt);
    stand_in::break_devices(0);
    stand_in::delay_work({});
  }

  Sweep sweep;
  std::optional<LaunchOrderCounts> counts;
};

// What one rank reads of a step. Parameters gathered from slices equal those slices' results.
struct Read {
  RankResult result;
  std::vector<Values> gathered;
};
using Results = std::vector<Read>;

// Memory that a collective may write late, in a world that has ended: it is kept to the end.
float* new_array(std::int64_t count) {
  static auto* const all = new std::vector<std::unique_ptr<Values>>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  all->push_back(std::make_unique<Values>(static_cast<std::size_t>(count), -1.0F));
  return all->back()->data();
}

// A model whose parameters become the step's result, by slices.
class Gathers {
 public:
  Gathers(Reducer& reducer, const Sweep& sweep, const Mesh& mesh)
      : reducer_(reducer), specs_(sweep.step.parameters), host_waits_(sweep.host_waits) {
    reducer_.prepare();
    std::vector<zero::GatheredParameter> parameters;
    for (const ParameterSpec& spec : specs_) {
      const std::int64_t count = element_count(spec.shape);
      arrays_.push_back({new_array(count), count, Dtype::kF32, mesh.device()});
      parameters.push_back({.name = spec.name, .array = arrays_.back()});
    }
    gather_.emplace(reducer_, std::move(parameters), 4096);
  }

  [[nodiscard]] std::vector<Values> run(GpuRank& rank) {
    std::vector<Values> got;
    try {
      Stream& stream = rank.stream();
      gather_->fence(stream);
      for (std::size_t p = 0; p < specs_.size(); ++p) {
        const TensorView shard = reducer_.shard(specs_[p].name);
        copy_bytes(arrays_[p].slice(reducer_.slice(specs_[p].name).offset, shard.count).data,
                   shard.data, shard.size_in_bytes(), stream);
      }
      gather_->start_all(stream.record());
      for (std::size_t p = specs_.size(); p-- > 0;) {
        if (host_waits_) {
          gather_->wait(static_cast<int>(p));
        } else {
          gather_->wait(static_cast<int>(p), stream);
        }
      }
      for (const TensorView& array : arrays_) {
        got.emplace_back(static_cast<std::size_t>(array.count));
        copy_bytes(got.back().data(), array.data, array.size_in_bytes(), stream);
      }
      stream.synchronize();
    } catch (...) {
      rank.finish();
      throw;
    }
    return got;
  }

 private:
  Reducer& reducer_;
  const std::vector<ParameterSpec>& specs_;
  bool host_waits_;
  std::vector<TensorView> arrays_;
  std::optional<zero::ParameterGather> gather_;
};

// Runs a step and asks for everything about its result.
Read run_step_and_read(GpuRank& rank, Reducer& reducer, const Sweep& sweep, const Mesh& mesh) {
  const Device gpu = mesh.device();
  for (std::size_t m = 0; m < sweep.step.schedule.size(); ++m) rank.run_microbatch(m);
  mesh.world().all_reduce({.data = {new_array(3), 3, Dtype::kF32, gpu}});
  static_cast<void>(reducer.found_inf());
  static_cast<void>(reducer.grad_norm());
  std::vector<NamedArray> arrays;  // the stand-in's GPUs use the host's memory
  for (const ParameterSpec& spec : sweep.step.parameters) {
    const std::int64_t count = element_count(spec.shape);
    arrays.push_back({spec.name, {new_array(count), count, Dtype::kF32, gpu}});
  }
  reducer.gather_gradients(arrays);
  return {rank.read(), {}};  // waits for the gather too, which uses that memory
}

constexpr int kSteps = 2;

// The steps of one rank with a new Reducer. `steps` gets what was read, also before an error.
void run_steps(const Mesh& mesh, const Sweep& sweep, std::vector<Results>& steps) {
  Reducer reducer(mesh, sweep.fresh_options());
  GpuRank rank(reducer, sweep.step, mesh, sweep.kept_until);
  std::optional<Gathers> gathers;
  if (sweep.gathers) gathers.emplace(reducer, sweep, mesh);
  for (Results& step : steps) {
    Read& read = step[static_cast<std::size_t>(mesh.rank())];
    read = run_step_and_read(rank, reducer, sweep, mesh);
    if (gathers) read.gathered = gathers->run(rank);
  }
}

// Of all ranks.
std::vector<Results> no_steps(const Sweep& sweep) {
  return std::vector<Results>(kSteps, Results(static_cast<std::size_t>(sweep.shape.size())));
}

// Everything that was read, by place.
std::map<std::string, Values> values_read(const std::vector<Results>& steps) {
  std::map<std::string, Values> all;
  for (std::size_t s = 0; s < steps.size(); ++s) {
    for (std::size_t r = 0; r < steps[s].size(); ++r) {
      const auto add = [&](const std::vector<Values>& values, const std::string& kind) {
        for (std::size_t p = 0; p < values.size(); ++p) {
          all["step " + std::to_string(s) + ", rank " + std::to_string(r) + ", " + kind +
              std::to_string(p)] = values[p];
        }
      };
      add(steps[s][r].result.shards, "shard ");
      add(steps[s][r].gathered, "gathered ");
    }
  }
  return all;
}

void expect_same(const std::vector<Results>& got, const std::vector<Results>& want,
                 const std::string& label) {
  const auto all = values_read(got);
  const auto wanted = values_read(want);
  ASSERT_EQ(all.size(), wanted.size()) << label;
  for (const auto& [where, values] : all) {
    expect_same_bits(values, wanted.at(where), label + ", " + where);
  }
}

// Checks what was read before an error.
void expect_no_garbage(const std::vector<Results>& got, const std::vector<Results>& want,
                       const std::string& label) {
  const auto same_or_nan = [](float value, float wanted) {
    return std::isnan(value) ||
           std::bit_cast<std::uint32_t>(value) == std::bit_cast<std::uint32_t>(wanted);
  };
  const auto wanted = values_read(want);
  for (const auto& [where, values] : values_read(got)) {
    EXPECT_TRUE(std::ranges::equal(values, wanted.at(where), same_or_nan))
        << "garbage: " << label << ", " << where;
  }
}

// On all ranks or on none, and in time.
void expect_same_end(const std::vector<std::exception_ptr>& errors, const std::string& label) {
  const auto failed = std::ranges::count_if(errors, [](const auto& e) { return e != nullptr; });
  EXPECT_TRUE(failed == 0 || failed == std::ssize(errors)) << label << ": " << failed << " failed";
}

// What the calls make that may run out of memory.
constexpr std::array<const char*, 3> kMakers{"cudaStreamCreateWithPriority",
                                             "cudaEventCreateWithFlags", "cudaHostAlloc"};

// What is read when nothing fails, and how many calls are made.
struct Clean {
  std::vector<Results> steps;
  std::int64_t allocations = 0;
  std::vector<std::int64_t> calls;                                // of NCCL, by rank
  std::vector<std::array<std::int64_t, kMakers.size()>> makings;  // by device
  std::int64_t kernels = 0;
};

Clean run_clean(const Sweep& sweep) {
  Clean clean{.steps = no_steps(sweep)};
  clean.makings.resize(static_cast<std::size_t>(sweep.shape.size()));
  const auto count = [&clean](std::int64_t sign) {
    clean.allocations += sign * stand_in::allocation_count();
    clean.kernels += sign * stand_in::kernel_launches();
    for (std::size_t device = 0; device < clean.makings.size(); ++device) {
      for (std::size_t i = 0; i < kMakers.size(); ++i) {
        clean.makings[device][i] +=
            sign * stand_in::call_count(kMakers[i], static_cast<int>(device));
      }
    }
  };
  run_nccl_mesh(sweep.shape, [&](const Mesh& mesh) {
    static_cast<void>(mesh.world().exchange("", "ready"));
    if (mesh.rank() == 0) count(-1);
    static_cast<void>(mesh.world().exchange("", "counted"));
    run_steps(mesh, sweep, clean.steps);
  });
  count(1);
  for (int r = 0; r < sweep.shape.size(); ++r) {
    clean.calls.push_back(std::ssize(nccl_stand_in().calls(r)));
  }
  return clean;
}

TEST_P(Seeded, StreamsThatWorkLateChangeNoBit) {
  const Clean clean = run_clean(sweep);
  std::vector<RankResult> last;
  for (const Read& read : clean.steps.back()) last.push_back(read.result);
  if (!sweep.loco) {
    expect_reference(last, sweep.step, sweep.options, sweep.shape, "the clean run");
  }
  for (std::size_t p = 0; sweep.gathers && p < sweep.step.parameters.size(); ++p) {
    const std::int64_t size = element_count(sweep.step.parameters[p].shape);
    for (const Read& read : clean.steps.back()) {
      const int replica = static_cast<int>(&read - clean.steps.back().data()) / sweep.shape.shard;
      expect_same_bits(read.gathered.at(p), joined(last, sweep.shape.shard, replica, p, size),
                       "gathered");
    }
  }
  stand_in::delay_work(sweep.delays);
  expect_same(run_clean(sweep).steps, clean.steps, "late");
}

TEST_P(Seeded, AFailedAllocationIsAnErrorOfAllRanksOrOfNone) {
  const Clean clean = run_clean(sweep);
  const auto ranks = static_cast<std::size_t>(sweep.shape.size());
  const int device = sweep.below(sweep.shape.size());
  const int failing = sweep.below(clean.allocations / sweep.shape.size());
  std::vector<std::string> errors(ranks);
  std::vector<Results> first = no_steps(sweep);
  std::vector<Results> second = no_steps(sweep);
  run_nccl_mesh(sweep.shape,
                [&](const Mesh& mesh) {
                  const auto r = static_cast<std::size_t>(mesh.rank());
                  static_cast<void>(mesh.world().exchange("", "ready"));
                  if (r == 0) stand_in::fail_allocation({{.after = failing, .device = device}});
                  static_cast<void>(mesh.world().exchange("", "set"));
                  try {
                    run_steps(mesh, sweep, first);
                  } catch (const std::exception& error) {
                    errors[r] = error.what();
                  }
                  static_cast<void>(mesh.world().exchange("", "over"));
                  if (r == 0) stand_in::fail_allocation(std::nullopt);
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
  expect_no_garbage(first, clean.steps, "after " + errors[0]);
  expect_same(second, clean.steps, "after " + errors[0]);
}

// Ranks that run the steps in a world that may end anywhere. One that fails leaves, like a process
// that ends with its exception.
std::vector<std::exception_ptr> try_steps(const Sweep& sweep, std::vector<Results>& steps,
                                          milliseconds timeout,
                                          const std::function<void()>& prepare = {},
                                          const RankBody& begin = {}) {
  return try_nccl_ranks(
      sweep.shape.size(),
      [&](Communicator& world) {
        if (begin) begin(world);
        const Mesh mesh = mesh_of(world, sweep.shape);
        run_steps(mesh, sweep, steps);
        for (const char* const what : {"over", "over again"}) {  // no two ranks part between
          static_cast<void>(mesh.world().exchange("", what));
        }
      },
      {.timeout = timeout}, prepare);
}

// Streams that others returned are used first.
std::vector<Stream> use_up_streams(Device gpu) {
  std::vector<Stream> streams;
  const std::int64_t before = stand_in::call_count(kMakers[0], gpu.index);
  while (stand_in::call_count(kMakers[0], gpu.index) == before) {
    streams.push_back(Stream::create(gpu, "other"));
  }
  return streams;
}

// The ranks may be unable to continue, but another world can.
void expect_survived(const Sweep& sweep, const Clean& clean, const std::vector<Results>& steps,
                     const std::vector<std::exception_ptr>& errors, const std::string& label) {
  expect_same_end(errors, label);
  expect_no_garbage(steps, clean.steps, label);
  expect_same(run_clean(sweep).steps, clean.steps, "after " + label);
}

TEST_P(Seeded, AFailedCallOfCudaLeavesNoGarbageAndNobodyHangs) {
  const Clean clean = run_clean(sweep);
  const int device = sweep.below(sweep.shape.size());
  const auto maker = static_cast<std::size_t>(sweep.below(std::ssize(kMakers)));
  const bool is_stream = maker == 0;
  const std::int64_t makings = clean.makings[static_cast<std::size_t>(device)][maker] + 1;
  const int failing = sweep.below(is_stream ? std::min<std::int64_t>(makings, 16) : makings);
  const std::string label = std::string(kMakers[maker]) + " " + std::to_string(failing) +
                            " of device " + std::to_string(device);
  std::vector<Stream> held;
  if (is_stream) held = use_up_streams(gpu_of(device));
  std::vector<Results> steps = no_steps(sweep);
  const auto errors = try_steps(sweep, steps, seconds(5), {}, [&](Communicator& world) {
    static_cast<void>(world.exchange("", "ready"));
    if (world.rank() == 0) {
      stand_in::fail_call({{.name = kMakers[maker],
                            .error = cudaErrorMemoryAllocation,
                            .after = failing,
                            .device = device}});
    }
    static_cast<void>(world.exchange("", "set"));
  });
  stand_in::fail_call(std::nullopt);
  expect_survived(sweep, clean, steps, errors, label);
}

TEST_P(Seeded, AFailedCallOfNcclLeavesNoGarbageAndNobodyHangs) {
  const Clean clean = run_clean(sweep);
  stand_in::FailingNcclCall failing;
  failing.name = sweep.pick<const char*>(
      {"ncclCommInitRankConfig", "ncclCommSplit", "ncclCommRegister", "ncclMemAlloc"});
  failing.rank = sweep.below(sweep.shape.size());
  failing.result = sweep.pick({1, 2});  // ncclUnhandledCudaError, ncclSystemError
  const bool makes_memory = failing.name == "ncclCommRegister" || failing.name == "ncclMemAlloc";
  failing.after = sweep.below(makes_memory ? 16 : 3);
  failing.times = sweep.pick({1, 2});  // the library tries again once
  failing.late = sweep.pick({true, false});
  const std::string label = failing.name + " " + std::to_string(failing.after) + " of rank " +
                            std::to_string(failing.rank) + (failing.late ? ", late" : "");
  std::vector<Results> steps = no_steps(sweep);
  const auto errors =
      try_steps(sweep, steps, seconds(5), [&failing] { nccl_stand_in().fail_call(failing); });
  expect_survived(sweep, clean, steps, errors, label);
}

// Its GPU stops doing NCCL's work at some call; if the process is killed, its control connection
// goes too.
TEST_P(Seeded, APeerThatDiesLeavesNoGarbageAndNobodyHangs) {
  const Clean clean = run_clean(sweep);
  const int dying = sweep.below(sweep.shape.size());
  const auto last_call =
      static_cast<std::size_t>(sweep.below(clean.calls[static_cast<std::size_t>(dying)]));
  const bool leaves = sweep.pick({true, false});
  const std::string label = "rank " + std::to_string(dying) + ", call " +
                            std::to_string(last_call) + (leaves ? ", leaves" : ", hangs");
  stand_in::delay_work(sweep.delays);
  std::vector<Results> steps = no_steps(sweep);
  std::atomic<bool> over = false;
  std::thread killer;
  const auto kill = [&over, dying, last_call,
                     leaves](const std::shared_ptr<comm::Control>& control) {
    while (!over && nccl_stand_in().calls(dying).size() <= last_call) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (over) return;
    nccl_stand_in().hang(dying);
    if (!leaves) return;
    control->fail({comm::FailureKind::kPeerLost, "the test's rank was lost", {dying}});
  };
  const auto start = std::chrono::steady_clock::now();
  const auto errors = try_steps(sweep, steps, milliseconds(700), {}, [&](Communicator& world) {
    if (world.rank() == dying) killer = std::thread(kill, control_of(world));
  });
  over = true;
  if (killer.joinable()) killer.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20)) << label;
  expect_no_garbage(steps, clean.steps, label);
  expect_same_end(errors, label);
}

// Of the packs, of the sums, or of whatever follows; and not through a timeout.
TEST_P(Seeded, AKernelThatFailsIsAnErrorOfEveryRank) {
  const Clean clean = run_clean(sweep);
  const int size = sweep.shape.size();
  stand_in::delay_work(sweep.delays);
  for (int repeat = 0; repeat < 4; ++repeat) {
    const stand_in::FailingKernel failing{sweep.below(size), sweep.below(clean.kernels / size)};
    const std::string label =
        "rank " + std::to_string(failing.device) + ", kernel " + std::to_string(failing.after);
    std::vector<Results> steps = no_steps(sweep);
    const auto start = std::chrono::steady_clock::now();
    const auto errors =
        try_steps(sweep, steps, seconds(40), [&failing] { stand_in::fail_kernel(failing); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20)) << label;
    for (const auto& error : errors) {
      EXPECT_EQ(error != nullptr, stand_in::is_broken(failing.device)) << label;
    }
    expect_no_garbage(steps, clean.steps, label);
    stand_in::break_devices(0);
  }
}

std::vector<std::uint64_t> seeds() {
  std::vector<std::uint64_t> all(seed_count());
  std::iota(all.begin(), all.end(), std::uint64_t{1});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Sweep, Seeded, ::testing::ValuesIn(seeds()));

}  // namespace
}  // namespace hsdp::test
