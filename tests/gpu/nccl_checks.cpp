// What the NCCL engine has to do on a GPU, and how long it takes.
#include "nccl_checks.h"

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/error.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "nccl_values.h"

namespace hsdp::gpu {
namespace {

void require(const std::string& problem) {
  if (!problem.empty()) throw Error(problem);
}

std::vector<float> values(std::int64_t count, const std::function<float(std::int64_t)>& value) {
  std::vector<float> all(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = value(i);
  return all;
}

// The sum in ascending rank of rows that were rounded once.
float sum_of_rows(int ranks, Dtype dtype, std::int64_t i) {
  float sum = rounded(dtype, noise(0, i));
  for (int r = 1; r < ranks; ++r) sum += rounded(dtype, noise(r, i));
  return sum;
}

void check_reduce_scatter(Communicator& world, Stream& stream, Device device) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const std::int64_t count = 300'007;
    std::vector<std::int64_t> offsets{0};
    for (int r = 1; r < world.size(); ++r) offsets.push_back(r * 1001);
    offsets.push_back(count);
    const RowCut cut(offsets);
    const std::int64_t begin = cut.begin(world.rank());
    const std::int64_t length = cut.length(world.rank());
    const DeviceValues in(
        device, values(count, [&](std::int64_t i) { return noise(world.rank(), i); }), dtype);
    const DeviceValues out(device, values(length, [](std::int64_t i) { return noise(99, i); }),
                           Dtype::kF32);
    world.reduce_scatter({.in = in.view(),
                          .out = out.view(),
                          .cut = cut,
                          .accumulate = true,
                          .sum_exponent = 3,
                          .divisor = 7.0F},
                         stream);
    const auto want = values(length, [&](std::int64_t i) {
      return (noise(99, i) + sum_of_rows(world.size(), dtype, begin + i) * 8.0F) / 7.0F;
    });
    require(difference(floats_of(out.view(), stream), want,
                       "reduce_scatter of " + std::string(name(dtype))));
  }
}

void check_all_reduce(Communicator& world, Stream& stream, Device device) {
  for (const Dtype wire : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const std::int64_t count = 300'007;
    const DeviceValues data(
        device, values(count, [&](std::int64_t i) { return noise(world.rank(), i); }), Dtype::kF32);
    world.all_reduce({.data = data.view(), .wire = wire, .divisor = 3.0F}, stream);
    const auto want = values(count, [&](std::int64_t i) {
      return rounded(wire, sum_of_rows(world.size(), wire, i)) / 3.0F;
    });
    require(difference(floats_of(data.view(), stream), want,
                       "all_reduce over " + std::string(name(wire))));
  }
}

void check_native(Communicator& world, Stream& stream, Device device) {
  const std::int64_t count = 300'007;
  const auto own = values(count, [&](std::int64_t i) { return small_integer(world.rank(), i); });
  const auto total = values(count, [&](std::int64_t i) {
    float sum = 0;
    for (int r = 0; r < world.size(); ++r) sum += small_integer(r, i);
    return sum;
  });
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
    const RowCut cut(count, world.size());
    const DeviceValues in(device, own, dtype);
    const DeviceValues out(device, std::vector<float>(own.size()), Dtype::kF32);
    const TensorView row = out.view().slice(0, cut.length(world.rank()));
    world.reduce_scatter({.in = in.view(), .out = row, .reduction = Reduction::kNative}, stream);
    const auto* const begin = total.data() + cut.begin(world.rank());
    require(
        difference(floats_of(row, stream), {begin, begin + row.count}, "native reduce_scatter"));
  }
  const DeviceValues data(device, own, Dtype::kF32);
  world.all_reduce({.data = data.view(), .reduction = Reduction::kNative}, stream);
  require(difference(floats_of(data.view(), stream), total, "native all_reduce"));
}

void check_moves(Communicator& world, Stream& stream, Device device) {
  const std::int64_t row = 1001;
  const std::int64_t count = row * world.size();
  const DeviceValues in(
      device, values(count, [&](std::int64_t i) { return noise(world.rank(), i); }), Dtype::kF32);
  const DeviceValues out(device, std::vector<float>(static_cast<std::size_t>(count)), Dtype::kF32);
  world.all_to_all(in.view(), out.view(), stream);
  require(difference(floats_of(out.view(), stream),
                     values(count,
                            [&](std::int64_t i) {
                              const auto from = static_cast<int>(i / row);
                              return noise(from, world.rank() * row + i % row);
                            }),
                     "all_to_all"));
  std::vector<std::int64_t> offsets{0};
  for (int r = 0; r < world.size(); ++r) offsets.push_back(offsets.back() + (r == 1 ? 0 : 77 + r));
  const RowCut cut(offsets);
  const std::int64_t own = cut.length(world.rank());
  const TensorView rows = out.view().slice(0, own * world.size());
  world.all_to_all(in.view().slice(0, cut.count()), rows, stream, cut);
  require(difference(floats_of(rows, stream),
                     values(rows.count,
                            [&](std::int64_t i) {
                              const auto from = static_cast<int>(i / own);
                              return noise(from, cut.begin(world.rank()) + i % own);
                            }),
                     "all_to_all with a cut"));
  world.all_gather(in.view().slice(world.rank() * row, row), out.view(), stream);
  require(
      difference(floats_of(out.view(), stream),
                 values(count, [&](std::int64_t i) { return noise(static_cast<int>(i / row), i); }),
                 "all_gather"));
  world.broadcast(out.view(), world.size() - 1, stream);
  world.barrier(stream);
  const SharedMemory memory = world.allocate(1000, Dtype::kF32);
  require(difference(floats_of(memory.view(), stream), std::vector<float>(1000), "allocate"));
  world.broadcast(memory.view(), 0, stream);
  world.wait(stream.record());
}

// One step of two microbatches in small buckets; the mean of rank r's noise.
void check_reducer(const Mesh& mesh, Stream& stream, bool native) {
  const std::int64_t count = 100'003;
  ReducerOptions options{.bucket_bytes = 64 << 10};
  if (native) options.reduction = "native";
  Reducer reducer(mesh, options);
  reducer.set_stream(stream);
  reducer.register_parameter({.name = "w", .shape = {count}});
  const auto gradient = [&](int rank, int m, std::int64_t i) {
    return native ? small_integer(rank + m, i) : noise(rank * 2 + m, i);
  };
  for (int m = 0; m < 2; ++m) {
    const DeviceValues data(
        mesh.device(), values(count, [&](std::int64_t i) { return gradient(mesh.rank(), m, i); }),
        Dtype::kF32);
    Microbatch open(reducer, {.last = m == 1});
    StridedView view;
    view.data = data.view().data;
    view.shape = {count};
    view.device = mesh.device();
    reducer.gradient_ready("w", view);
    open.end();
    reducer.packed().wait();
  }
  const TensorView shard = reducer.shard("w");
  const Slice slice = reducer.slice("w");
  const int shards = mesh.shard_size();
  const auto want = values(slice.count, [&](std::int64_t i) {
    float total = 0;
    for (int replica = 0; replica < mesh.replicate_size(); ++replica) {
      float carry = 0;
      for (int m = 0; m < 2; ++m) {
        float sum = gradient(replica * shards, m, slice.offset + i);
        for (int s = 1; s < shards; ++s) sum += gradient(replica * shards + s, m, slice.offset + i);
        carry = m == 0 ? sum : carry + sum;
      }
      total = replica == 0 ? carry : total + carry;
    }
    return total / static_cast<float>(mesh.size());
  });
  require(difference(floats_of(shard, stream), want, native ? "native step" : "exact step"));
  if (reducer.found_inf()) throw Error("step: found_inf without an infinity");
}

double milliseconds_of(Communicator& world, Stream& stream, const std::function<void()>& call) {
  constexpr int kCalls = 5;
  call();
  world.barrier(stream);
  world.wait(stream.record());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  world.wait(stream.record());
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  return took.count() / kCalls;
}

}  // namespace

void check_nccl_engine(Communicator& world, int replicate, int shard, Device device) {
  Stream stream = Stream::create(device, "check");
  const auto stage = [&](const char* what, const std::function<void()>& check) {
    check();
    static_cast<void>(world.exchange("", what));
    if (world.rank() == 0) std::printf("ok  %s\n", what);
  };
  stage("exact reduce_scatter", [&] { check_reduce_scatter(world, stream, device); });
  stage("exact all_reduce", [&] { check_all_reduce(world, stream, device); });
  stage("native sums of integers", [&] { check_native(world, stream, device); });
  stage("moves", [&] { check_moves(world, stream, device); });
  const Mesh mesh(world, {.replicate = replicate, .shard = shard, .device = device});
  stage("exact step", [&] { check_reducer(mesh, stream, false); });
  stage("native step", [&] { check_reducer(mesh, stream, true); });
}

void measure_nccl_engine(Communicator& world, Device device) {
  Stream stream = Stream::create(device, "measure");
  const std::int64_t count = std::int64_t{4} << 20;
  const Buffer in(device, static_cast<std::size_t>(count) * sizeof(float));
  const Buffer out(device, in.size());
  for (const Reduction reduction : {Reduction::kExact, Reduction::kNative}) {
    const double scatter = milliseconds_of(world, stream, [&] {
      world.reduce_scatter(
          {.in = in.view(Dtype::kF32),
           .out = out.view(Dtype::kF32).slice(0, RowCut(count, world.size()).length(world.rank())),
           .reduction = reduction},
          stream);
    });
    const double reduce = milliseconds_of(world, stream, [&] {
      world.all_reduce({.data = in.view(Dtype::kF32), .reduction = reduction}, stream);
    });
    if (world.rank() != 0) continue;
    std::printf("%-6s  16 MiB f32, %d ranks: reduce_scatter %8.2f ms, all_reduce %8.2f ms\n",
                reduction == Reduction::kExact ? "exact" : "native", world.size(), scatter, reduce);
  }
  world.barrier(stream);
  world.wait(stream.record());
}

}  // namespace hsdp::gpu
