// Prints the memory bandwidth of the kernels of LoCo and AdamW, and compares their times with the
// time of the same reads and writes at the bandwidth of a scan, a copy and a fill. All are measured
// in the same rounds, for each SIMD target or the one in HSDP_KERNELS. With several threads, each
// has its own core and arrays, all run the same kernel at the same time, and the slowest one
// counts.
//
//   kernel_bandwidth [MiB of fp32 an array, default 64 [part of a kernel's name [threads]]]
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/kernels/simd_target.h"
#include "measurement.h"
#include "quant/quantize.h"
#include "zero/adamw_kernels.h"

namespace {

using hsdp::Buffer;

struct Case {
  std::string name;
  double read_bytes;
  double written_bytes;
  std::function<void()> run;
  double best_s = std::numeric_limits<double>::max();
};

thread_local volatile double sink = 0.0;  // keeps the compiler from dropping results

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

constexpr int kBaselines = 4;  // they are the first cases

// Scans, copies and fills memory without arithmetic, bypassing the cache if the compiler can.
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
  cases.push_back({"memcpy", traffic, traffic, [=] { std::memcpy(to, from, bytes); }});
}

// int4 in groups of 64 with bf16 scales and int8 errors, as LoCo uses them.
struct Quantized {
  explicit Quantized(const Arrays& arrays_)
      : arrays(&arrays_),
        map(std::vector<hsdp::ParameterRange>{{.count = arrays_.count}}, 64, 1),
        layout(map, {}),
        codes(hsdp::Device{}, static_cast<std::size_t>(2 * map.element_count())),
        scales(hsdp::Device{}, static_cast<std::size_t>(8 * map.group_count())),
        figures(map.tiles().size()),
        messages(hsdp::Device{}, static_cast<std::size_t>(kMessages * distance())) {}
  [[nodiscard]] hsdp::quant::Message message(int r) const {
    return {layout.format(), messages.data() + r * distance(), 0, layout.rows().data()};
  }
  // Bytes from one message to the next, as in one all-to-all.
  [[nodiscard]] std::int64_t distance() const { return layout.cut().count(); }
  // `which` is 0 or 1.
  [[nodiscard]] hsdp::quant::ErrorState error(int which) const {
    return {.codes = reinterpret_cast<std::int8_t*>(codes.data()) + which * map.element_count(),
            .scales = reinterpret_cast<float*>(scales.data()) + which * map.group_count()};
  }

  static constexpr int kMessages = 9;
  const Arrays* arrays;
  hsdp::quant::GroupMap map;
  hsdp::quant::MessageLayout layout;
  Buffer codes;
  Buffer scales;
  std::vector<hsdp::quant::TileFigures> figures;
  Buffer messages;
};

void add_quantization(std::vector<Case>& cases, Quantized& memory) {
  const auto n = static_cast<double>(memory.map.element_count());
  const auto message = static_cast<double>(memory.layout.cut().count());
  const double error = n + 4.0 * static_cast<double>(memory.map.group_count());
  const auto* const values = static_cast<const float*>(memory.arrays->at(0));
  static const hsdp::quant::Dither kDither{1, 2, 3};
  const auto sender = [&memory, values](bool feeds_back) {
    hsdp::quant::Quantize args{.tiles = memory.map.tiles(), .values = values, .factor = 0.25F};
    if (feeds_back) {
      args.before = memory.error(0);
      args.after = memory.error(1);
    }
    args.out = memory.message(0);
    return args;
  };
  cases.push_back({"quantize int4", 4 * n, message, [=] { quantize(sender(false)); }});
  cases.push_back({"quantize int4, int8 error", 4 * n + error, message + error,
                   [=] { quantize(sender(true)); }});
  cases.push_back({"  with stochastic rounding", 4 * n + error, message + error, [=] {
                     hsdp::quant::Quantize args = sender(true);
                     args.dither = &kDither;
                     quantize(args);
                   }});
  cases.push_back({"  with figures", 4 * n + error, message + error, [=, &memory] {
                     hsdp::quant::Quantize args = sender(true);
                     args.figures = memory.figures.data();
                     quantize(args);
                   }});
  for (const int rows : {2, 8}) {
    cases.push_back({"sum of " + std::to_string(rows) + " int4, quantize, int8 error",
                     rows * message + error, message + error, [=, &memory] {
                       hsdp::quant::Quantize args = sender(true);
                       args.values = nullptr;
                       args.received = {memory.message(0), memory.distance(), rows};
                       args.out = memory.message(Quantized::kMessages - 1);
                       quantize(args);
                     }});
  }
  cases.push_back({"dequantize int4", message, 4 * n, [=, &memory] {
                     hsdp::quant::dequantize({.tiles = memory.map.tiles(),
                                              .in = {memory.message(0), 0, 1},
                                              .values = static_cast<float*>(memory.arrays->at(4))});
                   }});
}

// Separate parameters and moments: the update writes all of them, and values that other kernels
// leave in shared arrays may be subnormal, which is slow.
struct Optimized {
  explicit Optimized(const Arrays& arrays_) : arrays(&arrays_) {
    for (int i = 0; i < 3; ++i) {
      memory.emplace_back(hsdp::Device{}, static_cast<std::size_t>(arrays_.count) * 4);
    }
  }
  [[nodiscard]] hsdp::zero::AdamWSlice slice() const {
    const auto at = [this](std::size_t i) { return reinterpret_cast<float*>(memory[i].data()); };
    return {at(0), static_cast<const float*>(arrays->at(0)), at(1), at(2), arrays->count};
  }

  const Arrays* arrays;
  std::vector<Buffer> memory;
  hsdp::zero::AdamWClock clock;
};

void add_optimizer(std::vector<Case>& cases, Optimized& memory) {
  const auto n = static_cast<double>(memory.arrays->count);
  cases.push_back(
      {"adamw", 16 * n, 12 * n, [&memory] {
         const hsdp::Stream stream = hsdp::Stream::inline_host();
         const hsdp::zero::AdamWSlice slice = memory.slice();
         hsdp::zero::adamw_tick(
             {.options = {}, .grad_factor = nullptr, .found_inf = nullptr, .clock = &memory.clock},
             stream);
         hsdp::zero::adamw_update({&slice, 1}, &memory.clock, stream);
       }});
}

// CPU time of this thread, since other processes may use its core meanwhile.
double thread_s() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// The arrays and cases of one thread.
struct Workplace {
  explicit Workplace(std::int64_t elements)
      : arrays(elements), quantized(arrays), optimized(arrays) {}

  Arrays arrays;
  Quantized quantized;
  Optimized optimized;
  std::vector<Case> cases;
};

void prepare(Workplace& place, const std::string& wanted) {
  std::vector<Case>& cases = place.cases;
  cases.clear();
  add_baselines(cases, place.arrays);
  add_quantization(cases, place.quantized);
  add_optimizer(cases, place.optimized);
  const auto unwanted = [&](const Case& one) { return one.name.find(wanted) == std::string::npos; };
  cases.erase(std::remove_if(cases.begin() + kBaselines, cases.end(), unwanted), cases.end());
}

// Puts the slowest thread's times into the first workplace's cases.
void measure(std::list<Workplace>& places, int rounds) {
  std::barrier together(static_cast<std::ptrdiff_t>(places.size()));
  std::vector<std::thread> threads;
  for (Workplace& place : places) {
    threads.emplace_back([&, rank = static_cast<int>(threads.size())] {
      if (places.size() > 1) hsdp::bench::pin_to_core(rank);
      for (int round = 0; round < rounds; ++round) {
        for (Case& one : place.cases) {
          together.arrive_and_wait();
          const double start_s = thread_s();
          one.run();
          one.best_s = std::min(one.best_s, thread_s() - start_s);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Case>& slowest = places.front().cases;
  for (const Workplace& place : places) {
    for (std::size_t i = 0; i < slowest.size(); ++i) {
      slowest[i].best_s = std::max(slowest[i].best_s, place.cases[i].best_s);
    }
  }
}

// Time to copy the bytes that are both read and written, and to scan or fill the rest.
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
  const int threads = argc > 3 ? std::max(1, std::atoi(argv[3])) : 1;
  std::list<Workplace> places;
  for (int i = 0; i < threads; ++i) places.emplace_back((mebibytes << 20U) / 4);
  const int rounds = static_cast<int>(std::clamp<std::int64_t>(1024 / mebibytes, 5, 200));
  const std::string chosen = hsdp::kernels::simd_target();
  for (const std::string& target : hsdp::kernels::simd_targets()) {
    const bool only_one = std::getenv("HSDP_KERNELS") != nullptr;
    if (only_one ? target != chosen : target == "scalar") continue;
    hsdp::kernels::force_simd_target(target);
    for (Workplace& place : places) prepare(place, wanted);
    measure(places, rounds);
    const std::vector<Case>& cases = places.front().cases;
    std::printf("%s, arrays of %lld MiB, %d threads, best of %d\n%-40s %8s %8s %10s\n",
                target.c_str(), static_cast<long long>(mebibytes), threads, rounds, "", "GB/s",
                "of limit", "of memcpy");
    for (const Case& one : cases) {
      const double bytes_per_s = (one.read_bytes + one.written_bytes) / one.best_s;
      const Case& memcpy_case = cases[kBaselines - 1];
      const double memcpy_bytes_per_s =
          (memcpy_case.read_bytes + memcpy_case.written_bytes) / memcpy_case.best_s;
      std::printf("%-40s %8.1f %7.0f%% %9.0f%%\n", one.name.c_str(), bytes_per_s * 1e-9,
                  100.0 * roofline_s(one, cases) / one.best_s,
                  100.0 * bytes_per_s / memcpy_bytes_per_s);
    }
  }
  return 0;
}
