// Measures the bandwidth of each kernel with CUDA events, as a share of the bandwidth of a
// device-to-device copy in the same run. Compares the results with the scalar definition.
// Usage: kernel_bandwidth_gpu [--mib SIZE]...   of the largest array; default 64 and 512
// Exit status: 0, 1 when a result is wrong, 2 on bad usage, 77 when there is no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "hsdp/device/copy.h"
#include "hsdp/device/cuda_call.h"
#include "hsdp/device/flag.h"
#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/kernels/sum_rows.h"
#include "kernel_case.h"

namespace hsdp::gpu {
namespace {

constexpr int kLaunches = 10;
constexpr int kRepeats = 9;
constexpr double kAim = 0.9;

// Returns the seconds of one launch, the median of several rounds.
double seconds(const Case& what, Stream& stream) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda(cudaEventCreate(&begin), kGpu, "make an event");
  check_cuda(cudaEventCreate(&end), kGpu, "make an event");
  const auto handle = static_cast<cudaStream_t>(stream.native_handle());
  std::vector<double> rounds;
  for (int repeat = -2; repeat < kRepeats; ++repeat) {  // two rounds to warm up
    check_cuda(cudaEventRecord(begin, handle), kGpu, "record an event");
    for (int i = 0; i < kLaunches; ++i) what.launch(i);
    check_cuda(cudaEventRecord(end, handle), kGpu, "record an event");
    check_cuda(cudaEventSynchronize(end), kGpu, "wait for an event");
    float milliseconds = 0.0F;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), kGpu, "read an event");
    if (repeat >= 0) rounds.push_back(milliseconds / 1e3 / kLaunches);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::ranges::sort(rounds);
  return rounds[rounds.size() / 2];
}

// The memory that a kernel reads and writes: on the GPU, or on the host for the scalar definition.
struct Place {
  const std::byte* in;
  const std::byte* add;
  std::byte* out;
  std::int64_t count;
};

// A case that reads arrays 0 and 1 and writes array 2. `with(place, run)` calls run() with the
// arguments for a place; the kernel and the scalar definition take the same arguments.
template <class With, class Kernel, class Reference>
Case compared_case(Arena& arena, std::string name, std::int64_t count, double bytes_per_element,
                   Dtype out, With with, Kernel kernel, Reference reference) {
  Case made;
  made.name = std::move(name);
  made.bytes = static_cast<double>(count) * bytes_per_element;
  made.launch = [=, &arena](int set) {
    with(Place{arena.at(set, 0), arena.at(set, 1), arena.at(set, 2), count},
         [&](const auto& args) { kernel(args, arena.stream()); });
  };
  made.check = [=, &arena](int set) {
    const std::int64_t compared = std::min(count, kCompared);
    std::vector<std::byte> expected(static_cast<std::size_t>(compared) * size_bytes(out));
    with(Place{arena.host(), arena.host(), expected.data(), compared}, reference);
    const bool is_right = arena.read(arena.at(set, 2), expected.size()) == expected;
    return std::string(is_right ? "" : "the result is wrong");
  };
  return made;
}

double bytes_of(Dtype from, Dtype to) {
  return static_cast<double>(size_bytes(from) + size_bytes(to));
}

// The arrays hold `count` elements of the wider dtype. With `adds` the kernel adds into the fp32
// carry, out of place so that the result can be checked.
Case pack_case(Arena& arena, const std::string& title, Dtype from, Dtype to,
               bool transposed = false, bool adds = false) {
  const std::int64_t count = std::min(arena.count(from), arena.count(to)) / 4096 * 4096;
  const Shape shape = transposed ? Shape{count / 4096, 4096} : Shape{count};
  const Shape strides = transposed ? Shape{1, count / 4096} : Shape{};
  return compared_case(
      arena, title, count, bytes_of(from, to) + (adds ? 4 : 0), to,
      [=](const Place& at, auto run) {
        const StridedView view{at.in, from, kGpu, shape, strides};
        run(kernels::CastAndPack{.gradient = &view,
                                 .count = at.count,
                                 .add = adds ? at.add : nullptr,
                                 .out_dtype = to,
                                 .out = at.out});
      },
      [](const kernels::CastAndPack& args, const Stream& stream) { cast_and_pack(args, stream); },
      kernels::cast_and_pack_reference);
}

// Array 0 holds the rows, array 1 the carry that is added to their sum.
Case sum_case(Arena& arena, Dtype dtype, std::int64_t row_count) {
  const std::int64_t count = arena.count(dtype) / row_count / 64 * 64;
  const std::size_t row_bytes = static_cast<std::size_t>(count) * size_bytes(dtype);
  return compared_case(
      arena,
      "sum " + std::to_string(row_count) + " rows of " + std::string(name(dtype)) + ", add, divide",
      count, static_cast<double>(row_count) * static_cast<double>(size_bytes(dtype)) + 8,
      Dtype::kF32,
      [=](const Place& at, auto run) {
        std::vector<const void*> rows;
        for (std::int64_t r = 0; r < row_count; ++r) {
          rows.push_back(at.in + static_cast<std::size_t>(r) * row_bytes);
        }
        void* const out = at.out;
        run(kernels::SumRows{.spec = {.row_dtype = dtype, .divisor = 6.0F},
                             .rows = rows,
                             .add = reinterpret_cast<const float*>(at.add),
                             .outs = std::span(&out, 1),
                             .count = at.count});
      },
      [](const kernels::SumRows& args, const Stream& stream) { sum_rows(args, stream); },
      kernels::sum_rows_reference);
}

Case scale_case(Arena& arena, Dtype from, Dtype to) {
  return compared_case(
      arena, "scale " + std::string(name(from)) + " to " + std::string(name(to)),
      std::min(arena.count(from), arena.count(to)), bytes_of(from, to), to,
      [=](const Place& at, auto run) {
        run(kernels::ScaleAndCast{.in = at.in,
                                  .in_dtype = from,
                                  .out = at.out,
                                  .out_dtype = to,
                                  .count = at.count,
                                  .divisor = 3.0F});
      },
      [](const kernels::ScaleAndCast& args, const Stream& stream) { scale_and_cast(args, stream); },
      kernels::scale_and_cast_reference);
}

Case norm_case(Arena& arena, Dtype dtype) {
  Case made;
  made.name = "squared norm of " + std::string(name(dtype));
  made.bytes = static_cast<double>(arena.array_bytes());
  made.launch = [=, &arena](int set) {
    const kernels::SquaredNorm norm{{arena.at(set, 0), arena.count(dtype), dtype, kGpu},
                                    reinterpret_cast<double*>(arena.at(set, 2))};
    kernels::squared_norms({&norm, 1}, arena.stream());
  };
  made.check = [=, &arena](int set) {
    const double expected =
        kernels::squared_norm_reference({arena.host(), arena.count(dtype), dtype});
    double got = 0.0;
    std::memcpy(&got, arena.read(arena.at(set, 2), sizeof(got)).data(), sizeof(got));
    return got == expected ? std::string() : "the result is wrong";
  };
  return made;
}

Case nonfinite_case(Arena& arena, Dtype dtype, const Flag& flag) {
  Case made;
  made.name = "find non-finite " + std::string(name(dtype));
  made.bytes = static_cast<double>(arena.array_bytes());
  made.launch = [=, &arena](int set) {
    kernels::find_nonfinite({arena.at(set, 0), arena.count(dtype), dtype, kGpu}, flag.get(),
                            arena.stream());
  };
  made.check = [flag](int) { return std::string(*flag == 0 ? "" : "finite values were flagged"); };
  return made;
}

std::vector<Case> cases(Arena& arena, const Flag& flag) {
  constexpr Dtype f32 = Dtype::kF32;
  constexpr Dtype bf16 = Dtype::kBf16;
  constexpr Dtype f16 = Dtype::kF16;
  std::vector<Case> made = {pack_case(arena, "pack f32 to bf16", f32, bf16),
                            pack_case(arena, "pack bf16 to bf16", bf16, bf16),
                            pack_case(arena, "pack f16 to f16", f16, f16),
                            pack_case(arena, "pack bf16 to bf16, transposed", bf16, bf16, true),
                            pack_case(arena, "pack f32 to bf16, transposed", f32, bf16, true),
                            pack_case(arena, "add bf16 into f32", bf16, f32, false, true),
                            sum_case(arena, bf16, 8),
                            sum_case(arena, f16, 8),
                            sum_case(arena, f32, 4),
                            sum_case(arena, bf16, 64),
                            scale_case(arena, f32, f32),
                            scale_case(arena, bf16, f32),
                            norm_case(arena, f32),
                            norm_case(arena, bf16),
                            nonfinite_case(arena, f32, flag),
                            nonfinite_case(arena, bf16, flag)};
  std::ranges::move(quantize_cases(arena), std::back_inserter(made));
  return made;
}

bool measure(std::size_t mib) {
  Arena arena(mib << 20U, Stream::create(kGpu, "bandwidth"));
  const Flag flag = make_flag(kGpu);
  Case copy;
  copy.bytes = 2.0 * static_cast<double>(arena.array_bytes());
  copy.launch = [&arena](int set) {
    copy_bytes(arena.at(set, 2), arena.at(set, 0), arena.array_bytes(), arena.stream());
  };
  const double copy_rate = copy.bytes / seconds(copy, arena.stream());
  std::printf("arrays of %zu MiB: device-to-device copy %.0f GB/s read and written\n", mib,
              copy_rate / 1e9);
  bool right = true;
  for (const Case& one : cases(arena, flag)) {
    const double rate = one.bytes / seconds(one, arena.stream());
    const std::string problem = one.check(0);
    right = right && problem.empty();
    std::printf("  %-34s %7.0f GB/s  %5.1f %%  %s\n", one.name.c_str(), rate / 1e9,
                100 * rate / copy_rate,
                !problem.empty()           ? problem.c_str()
                : rate >= kAim * copy_rate ? ""
                                           : "below the aim of 90 %");
    std::fflush(stdout);
  }
  return right;
}

int run(const std::vector<std::size_t>& sizes) {
  try {
    static_cast<void>(Stream::create(kGpu, "bandwidth"));
  } catch (const UsageError& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, 0), kGpu, "ask for its name");
  std::printf("%s\n", properties.name);
  bool right = true;
  for (const std::size_t mib : sizes) right = measure(mib) && right;
  return right ? 0 : 1;
}

}  // namespace
}  // namespace hsdp::gpu

int main(int count, char** arguments) {
  std::vector<std::size_t> sizes;
  for (int i = 1; i < count; i += 2) {
    const int mib = i + 1 < count ? std::atoi(arguments[i + 1]) : 0;
    if (std::strcmp(arguments[i], "--mib") != 0 || mib < 16 || mib > 4096) {
      std::fprintf(stderr, "usage: kernel_bandwidth_gpu [--mib 16..4096]...\n");
      return 2;
    }
    sizes.push_back(static_cast<std::size_t>(mib));
  }
  if (sizes.empty()) sizes = {64, 512};
  try {
    return hsdp::gpu::run(sizes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_bandwidth_gpu: %s\n", error.what());
    return 1;
  }
}
