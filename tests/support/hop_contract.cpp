#include "tests/support/hop_contract.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {
namespace {

using Results = std::vector<std::vector<RankResult>>;  // [step][rank]

// Two groups; one has sync all twice in a step. No bucket or group of a codec divides the sizes.
std::vector<ParameterSpec> contract_parameters() {
  return {{.name = "norm", .shape = {37}},
          {.name = "large", .shape = {70, 60}},
          {.name = "empty", .shape = {0}},
          {.name = "late", .shape = {411}, .group = "late"},
          {.name = "scalar", .shape = {}}};
}

StepCase clean_step(MeshShape shape, std::uint64_t seed) {
  return random_step(contract_parameters(), shape.size(), {Sync::kShard, Sync::kAll}, seed);
}

StepCase overflowing_step(MeshShape shape) {
  StepCase step = clean_step(shape, 99);
  (*step.gradients[1][1].back())[17] = std::numeric_limits<float>::infinity();
  return step;
}

struct Setting {
  std::int64_t bucket_bytes = 1 << 10;
  ShardOver shard_over = ShardOver::kShard;
};

struct Made {
  std::shared_ptr<ReplicaHop> hop;
  std::unique_ptr<Reducer> reducer;
};

Made make(const Mesh& mesh, const MakeHop& make_hop, const Setting& setting) {
  Made made;
  made.hop = make_hop();
  made.reducer =
      std::make_unique<Reducer>(mesh, ReducerOptions{.bucket_bytes = setting.bucket_bytes,
                                                     .replica_hop = made.hop,
                                                     .shard_over = setting.shard_over});
  for (const ParameterSpec& spec : contract_parameters()) made.reducer->register_parameter(spec);
  return made;
}

RankResult run(Reducer& reducer, const StepCase& step, int rank) {
  for (int m = 0; m < 2; ++m) {
    reducer.set_requires_all_reduce(m == 1, "late");
    run_microbatch(reducer, step, m, rank, {});
  }
  return read_result(reducer, step);
}

void drop_a_step(Reducer& reducer, const StepCase& step, int rank) {
  reducer.begin_microbatch({.sync = Sync::kAll});
  const std::vector<StoredGradient> gradients = deliver(reducer, step, 0, rank);
  if (rank == 0) {
    reducer.abandon_step("on purpose");
    return;
  }
  reducer.end_microbatch();
  EXPECT_TRUE(caught<StepAbortedError>([&] { reducer.finish(); }));
}

// `between`: what every rank does between the two steps.
Results two_steps(MeshShape shape, const MakeHop& make_hop, const Setting& setting,
                  const std::function<void(const Mesh&, Made&)>& between) {
  Results results(2, std::vector<RankResult>(static_cast<std::size_t>(shape.size())));
  run_mesh(shape, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    Made made = make(mesh, make_hop, setting);
    results[0][rank] = run(*made.reducer, clean_step(shape, 1), mesh.rank());
    between(mesh, made);
    results[1][rank] = run(*made.reducer, clean_step(shape, 2), mesh.rank());
  });
  return results;
}

std::vector<Values> whole(const Results& results, MeshShape shape, int replica,
                          ShardOver shard_over) {
  std::vector<Values> all;
  for (const std::vector<RankResult>& step : results) {
    for (std::size_t p = 0; p < contract_parameters().size(); ++p) {
      all.push_back(joined(step, shape.shard, replica, p,
                           element_count(contract_parameters()[p].shape), shard_over));
    }
  }
  return all;
}

// By rank, the hops whose first step was under way when their world ended.
std::vector<std::shared_ptr<ReplicaHop>> cut_hops(MeshShape shape, const MakeHop& make_hop,
                                                  const Setting& setting) {
  std::vector<std::shared_ptr<ReplicaHop>> hops(static_cast<std::size_t>(shape.size()));
  const StepCase step = clean_step(shape, 4);
  const auto run_half = [&](Communicator& world) {
    const Mesh mesh(world, MeshOptions{.replicate = shape.replicate, .shard = shape.shard});
    const Made made = make(mesh, make_hop, setting);
    hops[static_cast<std::size_t>(mesh.rank())] = made.hop;
    made.reducer->set_requires_all_reduce(false, "late");
    run_microbatch(*made.reducer, step, 0, mesh.rank(), {});
    if (mesh.rank() == 0) world.abort("on purpose");
    EXPECT_TRUE(caught<Error>([&] { made.reducer->finish(); }));
  };
  static_cast<void>(try_ranks(shape.size(), run_half));
  return hops;
}

}  // namespace

void check_hop_contract(const MakeHop& make_hop, MeshShape shape, ShardOver shard_over) {
  const Setting small{.shard_over = shard_over};
  const Setting large{.bucket_bytes = 1 << 20, .shard_over = shard_over};
  const auto whole = [&](const Results& results, int replica) {
    return test::whole(results, shape, replica, shard_over);
  };
  const auto nothing = [](const Mesh&, Made&) {};
  const Results plain = two_steps(shape, make_hop, small, nothing);
  const std::vector<Values> want = whole(plain, 0);
  for (int replica = 1; replica < shape.replicate; ++replica) {
    expect_same_bits(whole(plain, replica), want, "replica " + std::to_string(replica));
  }
  expect_same_bits(whole(two_steps(shape, make_hop, large, nothing), 0), want, "large buckets");
  const auto not_clean = [&](const Mesh& mesh, Made& made) {
    run(*made.reducer, overflowing_step(shape), mesh.rank());
    EXPECT_TRUE(made.reducer->found_inf());
    drop_a_step(*made.reducer, clean_step(shape, 3), mesh.rank());
  };
  expect_same_bits(whole(two_steps(shape, make_hop, small, not_clean), 0), want,
                   "after steps that were not clean");
  const auto load = [&](const Mesh& mesh, Made& made) {
    Made fresh = make(mesh, make_hop, small);
    const Made& before = made;
    fresh.hop->load_state(before.hop->state());
    std::swap(fresh, made);
  };
  expect_same_bits(whole(two_steps(shape, make_hop, small, load), 0), want, "a saved state");
  const auto second_owner = [&](const Mesh& mesh, Made& made) {
    Reducer another(mesh, {.replica_hop = made.hop});
    another.register_parameter({.name = "w", .shape = {4}});
    EXPECT_TRUE(caught<UsageError>([&] { another.prepare(); }));
    EXPECT_LE(made.hop->describe().size(), 127U);
    EXPECT_LE(made.hop->word().size(), StepParty::kMaxWordBytes);
  };
  expect_same_bits(whole(two_steps(shape, make_hop, small, second_owner), 0), want,
                   "after a second owner");
  const auto hops = cut_hops(shape, make_hop, small);
  Results after(2, std::vector<RankResult>(static_cast<std::size_t>(shape.size())));
  run_mesh(shape, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    const Made made = make(
        mesh, [&] { return hops[rank]; }, small);
    for (std::size_t s = 0; s < 2; ++s) {
      after[s][rank] = run(*made.reducer, clean_step(shape, s + 1), mesh.rank());
    }
  });
  expect_same_bits(whole(after, 0), want, "after a step that was cut");
}

}  // namespace hsdp::test
