// Prints the memory traffic of every kernel beside what the same reads and writes cost at the
// bandwidth of a scan, a copy and a fill without arithmetic, all measured in the same rounds, for
// each SIMD target or the one in HSDP_KERNELS.
//
//   kernel_bandwidth [MiB of fp32 an array, default 64 [part of a kernel's name]]
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/kernels/simd_target.h"
#include "hsdp/kernels/sum_rows.h"

namespace {

using hsdp::Buffer;
using hsdp::Dtype;
using hsdp::kernels::cast_and_pack;
using hsdp::kernels::CastAndPack;
using hsdp::kernels::scale_and_cast;
using hsdp::kernels::ScaleAndCast;
using hsdp::kernels::sum_rows;
using hsdp::kernels::SumRows;

struct Case {
  std::string name;
  double read_bytes;
  double written_bytes;
  std::function<void()> run;
  double best_s = std::numeric_limits<double>::max();
};

volatile double sink = 0.0;  // keeps results alive

struct Arrays {
  explicit Arrays(std::int64_t elements) : count(elements) {
    const auto bytes = static_cast<std::size_t>(elements) * 4;
    for (int i = 0; i < 5; ++i) memory.emplace_back(hsdp::Device{}, bytes);
    for (Buffer& buffer : memory) {
      auto* const values = reinterpret_cast<std::uint32_t*>(buffer.data());
      for (std::int64_t i = 0; i < count; ++i) {  // finite in all three dtypes
        values[i] = 0x3c003f80U + static_cast<std::uint32_t>(i % 101) * 0x10001U;
      }
    }
  }
  [[nodiscard]] void* at(int i) const { return memory[static_cast<std::size_t>(i)].data(); }

  std::int64_t count;
  std::vector<Buffer> memory;
};

constexpr int kBaselines = 3;  // the first cases

// Reads, copies and fills memory with no arithmetic, around the cache where the compiler can.
void scan(const std::byte* from, std::size_t bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(from + i + 2048);
    std::uint64_t words[8];
    std::memcpy(words, from + i, sizeof words);
    for (const std::uint64_t word : words) sum |= word;
  }
  sink = static_cast<double>(sum);
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__SSE2__)
  for (std::size_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(from + i + 2048);
    __m128i line[4];
    std::memcpy(line, from + i, sizeof line);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i) + k, line[k]);
  }
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

void fill(std::byte* to, std::size_t bytes) {
#if defined(__SSE2__)
  const __m128i value = _mm_set1_epi8(0x3c);
  for (std::size_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), value);
  }
  _mm_sfence();
#else
  std::memset(to, 0x3c, bytes);
#endif
}

void add_baselines(std::vector<Case>& cases, const Arrays& arrays) {
  const auto bytes = static_cast<std::size_t>(arrays.count) * 4;
  const auto traffic = static_cast<double>(bytes);
  const auto* const from = static_cast<std::byte*>(arrays.at(0));
  auto* const to = static_cast<std::byte*>(arrays.at(1));
  cases.push_back({"scan", traffic, 0.0, [=] { scan(from, bytes); }});
  cases.push_back({"copy", traffic, traffic, [=] { copy(to, from, bytes); }});
  cases.push_back({"fill", 0.0, traffic, [=] { fill(to, bytes); }});
}

void add_sums(std::vector<Case>& cases, const Arrays& arrays) {
  const auto n = static_cast<double>(arrays.count);
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const auto size = static_cast<double>(hsdp::size_bytes(dtype));
    for (const int rows : {1, 2, 4}) {
      for (const bool carry : {false, true}) {
        for (const Dtype out : {Dtype::kF32, dtype}) {
          if (out == dtype && dtype == Dtype::kF32 && carry) continue;
          const double out_size = static_cast<double>(hsdp::size_bytes(out));
          const std::string label = std::string("sum ") + std::to_string(rows) + " " +
                                    std::string(name(dtype)) + (carry ? " + carry" : "") +
                                    " / 3 -> " + std::string(name(out));
          cases.push_back({label, n * (size * rows + (carry ? 4 : 0)), n * out_size, [=, &arrays] {
                             const void* sources[4];
                             for (int r = 0; r < rows; ++r) sources[r] = arrays.at(r);
                             void* target = arrays.at(4);
                             SumRows args;
                             args.spec.row_dtype = dtype;
                             args.spec.out_dtype = out;
                             args.spec.divisor = 3.0F;
                             args.rows = std::span(sources, static_cast<std::size_t>(rows));
                             args.outs = std::span(&target, 1);
                             args.add = carry && out == Dtype::kF32 ? static_cast<float*>(target)
                                                                    : nullptr;
                             if (carry && args.add == nullptr) {
                               args.add = static_cast<float*>(arrays.at(3));
                             }
                             args.count = arrays.count;
                             args.streaming_stores = !carry;
                             sum_rows(args);
                           }});
        }
      }
    }
  }
}

void add_casts(std::vector<Case>& cases, const Arrays& arrays) {
  const auto n = static_cast<double>(arrays.count);
  const std::int64_t side = 4096;
  for (const Dtype from : {Dtype::kF32, Dtype::kBf16}) {
    for (const Dtype to : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      const auto pack = [=, &arrays](hsdp::Shape shape, hsdp::Shape strides, bool streaming) {
        return [=, &arrays] {
          const hsdp::StridedView view{arrays.at(0), from, {}, shape, strides};
          CastAndPack args;
          args.gradient = &view;
          args.count = view.count();
          args.out_dtype = to;
          args.out = arrays.at(4);
          args.streaming_stores = streaming;
          cast_and_pack(args);
        };
      };
      const double read = n * static_cast<double>(hsdp::size_bytes(from));
      const double written = n * static_cast<double>(hsdp::size_bytes(to));
      const std::string label = std::string(name(from)) + " -> " + std::string(name(to));
      const std::int64_t rows = arrays.count / side;
      cases.push_back({"pack " + label, read, written, pack({arrays.count}, {}, true)});
      cases.push_back(
          {"pack transposed " + label, read, written, pack({rows, side}, {1, rows}, true)});
      cases.push_back({"pack channels_last " + label, read, written,
                       pack({rows / 16, side / 9, 9, 16},
                            {side / 9 * 144, 1, 16 * (side / 9), side / 9}, true)});
    }
  }
}

void add_scales_and_norms(std::vector<Case>& cases, const Arrays& arrays) {
  const auto n = static_cast<double>(arrays.count);
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const double bytes = n * static_cast<double>(hsdp::size_bytes(dtype));
    const std::string label(name(dtype));
    cases.push_back({"scale " + label + " -> f32", bytes, n * 4, [=, &arrays] {
                       ScaleAndCast args;
                       args.in = arrays.at(0);
                       args.in_dtype = dtype;
                       args.out = arrays.at(4);
                       args.count = arrays.count;
                       args.divisor = 3.0F;
                       args.streaming_stores = true;
                       scale_and_cast(args);
                     }});
    const hsdp::ConstTensorView view{arrays.at(0), arrays.count, dtype};
    cases.push_back(
        {"norm " + label, bytes, 0.0, [=] { sink = hsdp::kernels::squared_norm(view); }});
    cases.push_back(
        {"nonfinite " + label, bytes, 0.0, [=] { sink = hsdp::kernels::has_nonfinite(view); }});
  }
}

// Time that this thread ran: other processes may be on its core in between.
double thread_s() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void measure(std::vector<Case>& cases, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    for (Case& one : cases) {
      const double start_s = thread_s();
      one.run();
      one.best_s = std::min(one.best_s, thread_s() - start_s);
    }
  }
}

// Time of the same bytes as a copy, and what is left as a scan or a fill.
double roofline_s(const Case& one, const std::vector<Case>& cases) {
  const double bytes = cases[0].read_bytes;
  const double copied = std::min(one.read_bytes, one.written_bytes);
  return (copied * cases[1].best_s + (one.read_bytes - copied) * cases[0].best_s +
          (one.written_bytes - copied) * cases[2].best_s) /
         bytes;
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t mebibytes = argc > 1 ? std::max(1L, std::atol(argv[1])) : 64;
  const std::string wanted = argc > 2 ? argv[2] : "";
  const Arrays arrays((mebibytes << 20U) / 4);
  const int rounds = static_cast<int>(std::clamp<std::int64_t>(1024 / mebibytes, 5, 200));
  const std::string chosen = hsdp::kernels::simd_target();
  for (const std::string& target : hsdp::kernels::simd_targets()) {
    const bool only_one = std::getenv("HSDP_KERNELS") != nullptr;
    if (only_one ? target != chosen : target == "scalar") continue;
    hsdp::kernels::force_simd_target(target);
    std::vector<Case> cases;
    add_baselines(cases, arrays);
    add_sums(cases, arrays);
    add_casts(cases, arrays);
    add_scales_and_norms(cases, arrays);
    const auto unwanted = [&](const Case& one) {
      return one.name.find(wanted) == std::string::npos;
    };
    cases.erase(std::remove_if(cases.begin() + kBaselines, cases.end(), unwanted), cases.end());
    measure(cases, rounds);
    std::printf("%s, arrays of %lld MiB, best of %d\n%-40s %8s %8s\n", target.c_str(),
                static_cast<long long>(mebibytes), rounds, "", "GB/s", "of limit");
    for (const Case& one : cases) {
      std::printf("%-40s %8.1f %7.0f%%\n", one.name.c_str(),
                  (one.read_bytes + one.written_bytes) / one.best_s * 1e-9,
                  100.0 * roofline_s(one, cases) / one.best_s);
    }
  }
  return 0;
}
