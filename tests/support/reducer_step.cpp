#include "tests/support/reducer_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <numeric>
#include <thread>
#include <utility>

namespace hsdp::test {
namespace {

std::uint64_t seed_of(std::uint64_t seed, std::size_t parameter, int microbatch, int rank) {
  return seed * 1'000'003U + parameter * 10'007U + static_cast<std::uint64_t>(microbatch) * 101U +
         static_cast<std::uint64_t>(rank);
}

template <typename MakeValues>
StepCase make_step(std::vector<ParameterSpec> parameters, int world_size,
                   std::vector<Sync> schedule, MakeValues make_values) {
  StepCase step{.parameters = std::move(parameters), .schedule = std::move(schedule)};
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    Gradients gradients(step.schedule.size());
    for (std::size_t m = 0; m < gradients.size(); ++m) {
      for (int rank = 0; rank < world_size; ++rank) {
        gradients[m].emplace_back(make_values(p, step.parameters[p], static_cast<int>(m), rank));
      }
    }
    step.gradients.push_back(std::move(gradients));
  }
  return step;
}

std::vector<std::size_t> arrival_order(const StepCase& step, int microbatch, int rank,
                                       const Delivery& delivery) {
  std::vector<std::size_t> order;
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    const auto& ranks = step.gradients[p][static_cast<std::size_t>(microbatch)];
    if (ranks[static_cast<std::size_t>(rank)]) order.push_back(p);
  }
  if (delivery.order == Order::kReverse) std::reverse(order.begin(), order.end());
  if (delivery.order == Order::kRandom) {
    Random(seed_of(delivery.seed, 0, microbatch, rank)).shuffle(order);
  }
  return order;
}

std::vector<int> axis_order(const Shape& shape, bool transposed) {
  std::vector<int> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (transposed) std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace

StepCase integer_step(std::vector<ParameterSpec> parameters, int world_size, int microbatch_count,
                      std::uint64_t seed) {
  std::vector<Sync> schedule(static_cast<std::size_t>(microbatch_count), Sync::kShard);
  schedule.back() = Sync::kAll;
  return make_step(std::move(parameters), world_size, std::move(schedule),
                   [&](std::size_t p, const ParameterSpec& spec, int m, int rank) {
                     return integer_values(element_count(spec.shape), -3, 3,
                                           seed_of(seed, p, m, rank));
                   });
}

StepCase random_step(std::vector<ParameterSpec> parameters, int world_size,
                     std::vector<Sync> schedule, std::uint64_t seed) {
  return make_step(std::move(parameters), world_size, std::move(schedule),
                   [&](std::size_t p, const ParameterSpec& spec, int m, int rank) {
                     return random_values(element_count(spec.shape), spec.dtype,
                                          seed_of(seed, p, m, rank));
                   });
}

std::vector<ParameterSpec> odd_parameters(Dtype dtype) {
  return {{.name = "rows", .shape = {5, 3}, .dtype = dtype},
          {.name = "odd", .shape = {7}, .dtype = dtype},
          {.name = "large", .shape = {2049, 2, 2}, .dtype = dtype},
          {.name = "empty", .shape = {0}, .dtype = dtype},
          {.name = "scalar", .shape = {}, .dtype = dtype}};
}

void register_all(Reducer& reducer, const StepCase& step) {
  for (const ParameterSpec& spec : step.parameters) reducer.register_parameter(spec);
}

StoredGradient gradient_of(const StepCase& step, std::size_t parameter, int microbatch, int rank) {
  const ParameterSpec& spec = step.parameters[parameter];
  const auto& ranks = step.gradients[parameter][static_cast<std::size_t>(microbatch)];
  return {*ranks[static_cast<std::size_t>(rank)], spec.shape, spec.dtype};
}

std::vector<StoredGradient> deliver(Reducer& reducer, const StepCase& step, int microbatch,
                                    int rank, const Delivery& delivery) {
  const std::vector<std::size_t> order = arrival_order(step, microbatch, rank, delivery);
  std::vector<StoredGradient> stored;
  for (const std::size_t p : order) {
    const auto& ranks = step.gradients[p][static_cast<std::size_t>(microbatch)];
    const ParameterSpec& spec = step.parameters[p];
    stored.emplace_back(*ranks[static_cast<std::size_t>(rank)], spec.shape, spec.dtype,
                        axis_order(spec.shape, delivery.transposed));
  }
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(delivery.thread_count));
  const auto hand_over = [&](std::size_t thread) {
    try {
      for (std::size_t i = thread; i < order.size(); i += errors.size()) {
        reducer.gradient_ready(step.parameters[order[i]].name, stored[i].view());
      }
    } catch (...) {
      errors[thread] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t t = 1; t < errors.size(); ++t) threads.emplace_back(hand_over, t);
  hand_over(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    reducer.abandon_step("a gradient was refused");  // while the other gradients still exist
    std::rethrow_exception(error);
  }
  return stored;
}

void run_microbatch(Reducer& reducer, const StepCase& step, int microbatch, int rank,
                    const MicrobatchOptions& options, const Delivery& delivery) {
  Microbatch open(reducer, options);
  std::vector<StoredGradient> stored = deliver(reducer, step, microbatch, rank, delivery);
  open.end();
  for (StoredGradient& gradient : stored) gradient.poison();
}

void drop_step(Reducer& reducer, const StepCase& step, int rank) {
  reducer.begin_microbatch({.last = true});
  if (rank == 1) {
    EXPECT_THROW(reducer.end_microbatch(), UsageError);
    return;
  }
  const auto gradients = deliver(reducer, step, 0, rank);
  const auto hear = [&] {
    reducer.end_microbatch();
    static_cast<void>(reducer.shard(step.parameters.front().name));
  };
  EXPECT_THROW(hear(), StepAbortedError);
}

void run_schedule(Reducer& reducer, const StepCase& step, int rank, const Delivery& delivery) {
  for (std::size_t m = 0; m < step.schedule.size(); ++m) {
    run_microbatch(reducer, step, static_cast<int>(m), rank, {.sync = step.schedule[m]}, delivery);
  }
  if (step.finish) reducer.finish();
}

RankResult run_step(Reducer& reducer, const StepCase& step, int rank, const Delivery& delivery) {
  reducer.set_gradient_divide_factor(step.divide_factor);
  reducer.set_loss_scale(step.loss_scale);
  run_schedule(reducer, step, rank, delivery);
  return read_result(reducer, step);
}

RankResult read_result(Reducer& reducer, const StepCase& step) {
  RankResult result;
  for (const ParameterSpec& spec : step.parameters) {
    result.slices.push_back(reducer.slice(spec.name));
    result.shards.push_back(values_of(reducer.shard(spec.name)));
  }
  return result;
}

Values values_of(const TensorView& view) {
  EXPECT_EQ(view.dtype, Dtype::kF32);
  const auto* data = static_cast<const float*>(view.data);
  return {data, data + view.count};
}

Values joined(std::span<const RankResult> ranks, int shard_size, int replica, std::size_t parameter,
              std::int64_t count, ShardOver shard_over) {
  std::vector<int> order;
  const int replicate_size = static_cast<int>(std::ssize(ranks)) / shard_size;
  for (int s = 0; s < shard_size; ++s) {
    for (int q = 0; q < replicate_size; ++q) {
      if (shard_over == ShardOver::kMesh || q == replica) order.push_back(q * shard_size + s);
    }
  }
  Values values;
  for (const int r : order) {
    const RankResult& rank = ranks[static_cast<std::size_t>(r)];
    if (rank.slices.size() <= parameter) {
      ADD_FAILURE() << "rank " << r << " has no result";
      return {};
    }
    const Slice& slice = rank.slices[parameter];
    if (slice.count > 0) {
      EXPECT_EQ(slice.offset, static_cast<std::int64_t>(values.size()));
    }
    EXPECT_EQ(slice.count, static_cast<std::int64_t>(rank.shards[parameter].size()));
    values.insert(values.end(), rank.shards[parameter].begin(), rank.shards[parameter].end());
  }
  EXPECT_EQ(static_cast<std::int64_t>(values.size()), count);
  return values;
}

ReferenceStep reference_step(const StepCase& step, const ReducerOptions& options, MeshShape shape,
                             std::size_t parameter) {
  const ParameterSpec& spec = step.parameters[parameter];
  const Dtype reduce =
      spec.reduce_dtype ? *spec.reduce_dtype : options.reduce_dtype.value_or(spec.dtype);
  return {.replicate = shape.replicate,
          .shard = shape.shard,
          .schedule = step.schedule,
          .finish = step.finish,
          .gradient_dtype = spec.dtype,
          .reduce_dtype = reduce,
          .replica_dtype = options.replica_dtype.value_or(reduce),
          .accumulate_dtype = options.accumulate_dtype,
          .shard_over = options.shard_over,
          .divide_factor = step.divide_factor,
          .loss_scale = step.loss_scale};
}

std::vector<Values> reference_results(const StepCase& step, const ReducerOptions& options,
                                      MeshShape shape) {
  std::vector<Values> results;
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    results.push_back(reference_result(reference_step(step, options, shape, p), step.gradients[p]));
  }
  return results;
}

void expect_reference(std::span<const RankResult> ranks, const StepCase& step,
                      const ReducerOptions& options, MeshShape shape, const std::string& label) {
  const std::vector<Values> want = reference_results(step, options, shape);
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    for (int replica = 0; replica < shape.replicate; ++replica) {
      const Values got = joined(ranks, shape.shard, replica, p,
                                element_count(step.parameters[p].shape), options.shard_over);
      expect_same_bits(got, want[p],
                       label + ", parameter " + step.parameters[p].name + ", replica " +
                           std::to_string(replica));
    }
  }
}

void expect_same_bits(const Values& got, const Values& want, const std::string& label) {
  ASSERT_EQ(got.size(), want.size()) << label;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(want[i]))
        << label << ": element " << i << " is " << got[i] << ", expected " << want[i];
  }
}

void expect_same_bits(const std::vector<Values>& got, const std::vector<Values>& want,
                      const std::string& label) {
  ASSERT_EQ(got.size(), want.size()) << label;
  for (std::size_t i = 0; i < got.size(); ++i) {
    expect_same_bits(got[i], want[i], label + ", array " + std::to_string(i));
  }
}

void run_reducers(MeshShape shape, const StepCase& step, const ReducerOptions& options,
                  const ReducerBody& body, const ThreadRanksOptions& ranks) {
  run_mesh(
      shape,
      [&](const Mesh& mesh) {
        Reducer reducer(mesh, options);
        register_all(reducer, step);
        body(reducer, mesh);
      },
      ranks);
}

void expect_result(MeshShape shape, const StepCase& step, const ReducerOptions& options,
                   const ReducerBody& body, const ThreadRanksOptions& ranks) {
  std::vector<RankResult> results(static_cast<std::size_t>(shape.size()));
  const auto read = [&](Reducer& reducer, const Mesh& mesh) {
    body(reducer, mesh);
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, step);
  };
  run_reducers(shape, step, options, read, ranks);
  expect_reference(results, step, options, shape, "the result");
}

std::vector<Values> gathered(Reducer& reducer, const StepCase& step) {
  std::vector<Values> arrays;
  std::vector<NamedArray> views;
  for (const ParameterSpec& spec : step.parameters) {
    arrays.emplace_back(static_cast<std::size_t>(element_count(spec.shape)));
  }
  for (std::size_t p = 0; p < arrays.size(); ++p) {
    views.push_back({.name = step.parameters[p].name,
                     .array = {.data = arrays[p].data(),
                               .count = static_cast<std::int64_t>(arrays[p].size())}});
  }
  reducer.gather_gradients(views);
  return arrays;
}

}  // namespace hsdp::test
