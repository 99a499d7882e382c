// Checks what the NCCL engine does on a GPU, and measures how long it takes.
#include "nccl_checks.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/kernels/arithmetic.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer.h"

namespace hsdp::gpu {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};
constexpr std::int64_t kCount = 300'007;

// Values of any magnitude and sign. Every rank can compute those of all ranks.
float noise(int rank, std::int64_t i) {
  std::uint64_t x = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15U +
                    static_cast<std::uint64_t>(rank + 1) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  x ^= x >> 31U;
  return std::ldexp(static_cast<float>(x % 20001) / 10000.0F - 1.0F,
                    static_cast<int>((x >> 40U) % 24) - 12);
}

// Integers whose sums over a few ranks are exact in every dtype.
float small_integer(int rank, std::int64_t i) {
  return static_cast<float>((i * 7 + rank * 3) % 13);
}

std::vector<float> values(std::int64_t count, const std::function<float(std::int64_t)>& value) {
  std::vector<float> all(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = value(i);
  return all;
}

std::vector<float> noise_of(int rank, std::int64_t count) {
  return values(count, [rank](std::int64_t i) { return noise(rank, i); });
}

class DeviceValues {
 public:
  DeviceValues(Device device, const std::vector<float>& values, Dtype dtype = Dtype::kF32)
      : dtype_(dtype), buffer_(device, values.size() * size_bytes(dtype)) {
    std::vector<std::byte> bytes(buffer_.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      kernels::encode(values[i], bytes.data(), static_cast<std::int64_t>(i), dtype);
    }
    Stream stream = Stream::create(device, "fill");
    copy_bytes(buffer_.data(), bytes.data(), bytes.size(), stream);
    stream.synchronize();
  }
  [[nodiscard]] TensorView view() const { return buffer_.view(dtype_); }

 private:
  Dtype dtype_;
  Buffer buffer_;
};

// Throws an Error that names the first element whose bits differ.
void require_equal(TensorView got, const std::vector<float>& want, const std::string& what,
                   Stream& stream) {
  if (got.count != static_cast<std::int64_t>(want.size())) {
    throw Error(what + ": another number of elements");
  }
  std::vector<float> found(want.size());
  copy_bytes(found.data(), got.data, got.size_in_bytes(), stream);
  stream.synchronize();
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::memcmp(&found[i], &want[i], sizeof(float)) == 0) continue;
    throw Error(what + ": element " + std::to_string(i) + ": expected " + std::to_string(want[i]) +
                ", got " + std::to_string(found[i]));
  }
}

// The sum, in ascending rank, of rows that were rounded once.
float sum_of_rows(int ranks, Dtype dtype, std::int64_t i) {
  float sum = kernels::rounded_through(noise(0, i), dtype);
  for (int r = 1; r < ranks; ++r) sum += kernels::rounded_through(noise(r, i), dtype);
  return sum;
}

void check_reduce_scatter(Communicator& world, Stream& stream, Device device) {
  for (const Dtype dtype : kDtypes) {
    std::vector<std::int64_t> offsets{0};
    for (int r = 1; r < world.size(); ++r) offsets.push_back(r * 1001);
    offsets.push_back(kCount);
    const RowCut cut(offsets);
    const std::int64_t begin = cut.begin(world.rank());
    const std::int64_t length = cut.length(world.rank());
    const DeviceValues in(device, noise_of(world.rank(), kCount), dtype);
    const DeviceValues out(device, noise_of(99, length));
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
    require_equal(out.view(), want, "reduce_scatter of " + std::string(name(dtype)), stream);
  }
}

void check_all_reduce(Communicator& world, Stream& stream, Device device) {
  for (const Dtype wire : kDtypes) {
    const DeviceValues data(device, noise_of(world.rank(), kCount));
    world.all_reduce({.data = data.view(), .wire = wire, .divisor = 3.0F}, stream);
    const auto want = values(kCount, [&](std::int64_t i) {
      return kernels::rounded_through(sum_of_rows(world.size(), wire, i), wire) / 3.0F;
    });
    require_equal(data.view(), want, "all_reduce over " + std::string(name(wire)), stream);
  }
}

void check_native(Communicator& world, Stream& stream, Device device) {
  const auto own = values(kCount, [&](std::int64_t i) { return small_integer(world.rank(), i); });
  const auto total = values(kCount, [&](std::int64_t i) {
    float sum = 0;
    for (int r = 0; r < world.size(); ++r) sum += small_integer(r, i);
    return sum;
  });
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
    const RowCut cut(kCount, world.size());
    const DeviceValues in(device, own, dtype);
    const DeviceValues out(device, std::vector<float>(own.size()));
    const TensorView row = out.view().slice(0, cut.length(world.rank()));
    world.reduce_scatter({.in = in.view(), .out = row, .reduction = Reduction::kNative}, stream);
    const auto* const begin = total.data() + cut.begin(world.rank());
    require_equal(row, {begin, begin + row.count}, "native reduce_scatter", stream);
  }
  const DeviceValues data(device, own);
  world.all_reduce({.data = data.view(), .reduction = Reduction::kNative}, stream);
  require_equal(data.view(), total, "native all_reduce", stream);
}

void check_moves(Communicator& world, Stream& stream, Device device) {
  const std::int64_t row = 1001;
  const std::int64_t count = row * world.size();
  const DeviceValues in(device, noise_of(world.rank(), count));
  const DeviceValues out(device, std::vector<float>(static_cast<std::size_t>(count)));
  // Rows of `length` elements from all ranks; each rank has its row at `begin`.
  const auto received = [&](std::int64_t length, std::int64_t begin) {
    return values(length * world.size(), [=](std::int64_t i) {
      return noise(static_cast<int>(i / length), begin + i % length);
    });
  };
  world.all_to_all(in.view(), out.view(), stream);
  require_equal(out.view(), received(row, world.rank() * row), "all_to_all", stream);
  std::vector<std::int64_t> offsets{0};
  for (int r = 0; r < world.size(); ++r) offsets.push_back(offsets.back() + (r == 1 ? 0 : 77 + r));
  const RowCut cut(offsets);
  const std::int64_t own = cut.length(world.rank());
  const TensorView rows = out.view().slice(0, own * world.size());
  world.all_to_all(in.view().slice(0, cut.count()), rows, stream, cut);
  require_equal(rows, received(own, cut.begin(world.rank())), "all_to_all with a cut", stream);
  world.all_gather(in.view().slice(world.rank() * row, row), out.view(), stream);
  const auto gathered =
      values(count, [&](std::int64_t i) { return noise(static_cast<int>(i / row), i); });
  require_equal(out.view(), gathered, "all_gather", stream);
  world.broadcast(out.view(), world.size() - 1, stream);
  world.barrier(stream);
  const SharedMemory memory = world.allocate(1000, Dtype::kF32);
  require_equal(memory.view(), std::vector<float>(1000), "allocate", stream);
  world.broadcast(memory.view(), 0, stream);
  world.wait(stream.record());
}

// Checks the means of one step with two microbatches in small buckets.
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
        mesh.device(), values(count, [&](std::int64_t i) { return gradient(mesh.rank(), m, i); }));
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
  require_equal(shard, want, native ? "native step" : "exact step", stream);
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
