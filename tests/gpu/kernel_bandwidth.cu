// Bandwidth of each kernel, timed by CUDA events, as a share of the device-to-device copy bandwidth
// measured in the same run. Results are compared with the scalar definition.
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

// Seconds of one launch: the median of several rounds.
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

// Compares the first elements of array 2 with what `reference` makes of the host's values.
std::string compare(Arena& arena, int set, Dtype dtype, std::int64_t count,
                    const std::function<void(std::byte* out)>& reference) {
  const std::size_t bytes = static_cast<std::size_t>(count) * size_bytes(dtype);
  std::vector<std::byte> expected(bytes);
  reference(expected.data());
  return arena.read(arena.at(set, 2), bytes) == expected ? "" : "the result is wrong";
}

// From array 0 to array 2; the arrays hold `count` elements of the wider dtype.
Case pack_case(Arena& arena, Dtype from, Dtype to, bool transposed) {
  const std::int64_t count = std::min(arena.count(from), arena.count(to)) / 4096 * 4096;
  const Shape shape = transposed ? Shape{count / 4096, 4096} : Shape{count};
  const Shape strides = transposed ? Shape{1, count / 4096} : Shape{};
  Case made;
  made.name = std::string("pack ") + std::string(name(from)) + " to " + std::string(name(to)) +
              (transposed ? ", transposed" : "");
  made.bytes = static_cast<double>(count) * static_cast<double>(size_bytes(from) + size_bytes(to));
  const auto call = [=](const void* gradient, void* out, std::int64_t length, auto run) {
    const StridedView view{gradient, from, kGpu, shape, strides};
    kernels::CastAndPack args;
    args.gradient = &view;
    args.count = length;
    args.out = out;
    args.out_dtype = to;
    run(args);
  };
  made.launch = [=, &arena](int set) {
    call(arena.at(set, 0), arena.at(set, 2), count,
         [&arena](const kernels::CastAndPack& args) { cast_and_pack(args, arena.stream()); });
  };
  made.check = [=, &arena](int set) {
    return compare(arena, set, to, kCompared, [&](std::byte* out) {
      call(arena.host(), out, kCompared, kernels::cast_and_pack_reference);
    });
  };
  return made;
}

// bf16 gradient added into the fp32 carry: array 0 into array 1, out of place for the check.
Case accumulate_case(Arena& arena) {
  const std::int64_t count = arena.count(Dtype::kF32);
  Case made;
  made.name = "add bf16 into f32";
  made.bytes = static_cast<double>(count) * 10;
  const auto call = [](const void* gradient, const void* add, void* out, std::int64_t length,
                       auto run) {
    const StridedView view{gradient, Dtype::kBf16, kGpu, {length}, {}};
    kernels::CastAndPack args;
    args.gradient = &view;
    args.count = length;
    args.add = add;
    args.out = out;
    run(args);
  };
  made.launch = [=, &arena](int set) {
    call(arena.at(set, 0), arena.at(set, 1), arena.at(set, 2), count,
         [&arena](const kernels::CastAndPack& args) { cast_and_pack(args, arena.stream()); });
  };
  made.check = [=, &arena](int set) {
    return compare(arena, set, Dtype::kF32, kCompared, [&](std::byte* out) {
      call(arena.host(), arena.host(), out, kCompared, kernels::cast_and_pack_reference);
    });
  };
  return made;
}

// Array 0 holds the rows; the total joins the carry of array 1 and goes to array 2.
Case sum_case(Arena& arena, Dtype dtype, std::int64_t row_count) {
  const std::int64_t count = arena.count(dtype) / row_count / 64 * 64;
  const std::size_t row_bytes = static_cast<std::size_t>(count) * size_bytes(dtype);
  Case made;
  made.name =
      "sum " + std::to_string(row_count) + " rows of " + std::string(name(dtype)) + ", add, divide";
  made.bytes = static_cast<double>(count) *
               static_cast<double>(static_cast<std::size_t>(row_count) * size_bytes(dtype) + 8);
  const auto call = [=](const std::byte* first, const std::byte* add, void* out,
                        std::int64_t length, auto run) {
    std::vector<const void*> rows;
    for (std::int64_t r = 0; r < row_count; ++r) {
      rows.push_back(first + static_cast<std::size_t>(r) * row_bytes);
    }
    kernels::SumRows args;
    args.spec.row_dtype = dtype;
    args.spec.divisor = 6.0F;
    args.rows = rows;
    args.add = reinterpret_cast<const float*>(add);
    args.outs = std::span(&out, 1);
    args.count = length;
    run(args);
  };
  made.launch = [=, &arena](int set) {
    call(arena.at(set, 0), arena.at(set, 1), arena.at(set, 2), count,
         [&arena](const kernels::SumRows& args) { sum_rows(args, arena.stream()); });
  };
  made.check = [=, &arena](int set) {
    const std::int64_t compared = std::min(count, kCompared);
    return compare(arena, set, Dtype::kF32, compared, [&](std::byte* out) {
      call(arena.host(), arena.host(), out, compared, kernels::sum_rows_reference);
    });
  };
  return made;
}

Case scale_case(Arena& arena, Dtype from, Dtype to) {
  const std::int64_t count = std::min(arena.count(from), arena.count(to));
  Case made;
  made.name = "scale " + std::string(name(from)) + " to " + std::string(name(to));
  made.bytes = static_cast<double>(count) * static_cast<double>(size_bytes(from) + size_bytes(to));
  const auto arguments = [=](const void* in, void* out, std::int64_t length) {
    kernels::ScaleAndCast args;
    args.in = in;
    args.in_dtype = from;
    args.out = out;
    args.out_dtype = to;
    args.count = length;
    args.divisor = 3.0F;
    return args;
  };
  made.launch = [=, &arena](int set) {
    scale_and_cast(arguments(arena.at(set, 0), arena.at(set, 2), count), arena.stream());
  };
  made.check = [=, &arena](int set) {
    return compare(arena, set, to, kCompared, [&](std::byte* out) {
      scale_and_cast_reference(arguments(arena.host(), out, kCompared));
    });
  };
  return made;
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
  std::vector<Case> made = {pack_case(arena, f32, bf16, false),
                            pack_case(arena, bf16, bf16, false),
                            pack_case(arena, f16, f16, false),
                            pack_case(arena, bf16, bf16, true),
                            pack_case(arena, f32, bf16, true),
                            accumulate_case(arena),
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
