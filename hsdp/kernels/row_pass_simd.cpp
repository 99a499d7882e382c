#include <cstddef>
#include <cstdint>

// First of the Highway headers.
#include "hsdp/kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hsdp/kernels/row_pass_simd.cpp"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on
#include <hwy/cache_control.h>

#include "hsdp/kernels/float_environment.h"
#include "hsdp/kernels/row_pass.h"
#include "hsdp/kernels/simd_dispatch.h"
#include "hsdp/kernels/vector_codec.h"

HWY_BEFORE_NAMESPACE();
namespace hsdp::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

std::uint32_t run_simd(const RowPass& pass) { return run_scalar_range(pass, 0, pass.count); }

#else

constexpr std::size_t kLargeOutputBytes = 262144;  // unlikely to be in a cache already

// A long pass walks several stretches side by side. The hardware prefetches along each of them, and
// together they keep more cache lines in flight than one could (1.5 times as fast from memory).
constexpr std::size_t kStretchElements = 4096;
constexpr std::size_t kAheadElements = 512;

// How many stretches a long pass walks side by side [Note: stretches].
constexpr std::size_t stretches(std::size_t row_count) {
  return row_count <= 1 ? 8 : row_count <= 2 ? 4 : 2;
}

enum class Division { kNone, kMultiply, kDivide };

// The pass, unpacked into what the loops keep in registers.
struct Plan {
  explicit Plan(const RowPass& pass);

  const void* const* rows;
  std::size_t row_count;
  void* const* outs;
  std::size_t out_count;
  const void* add;
  Dtype add_dtype;
  Dtype total_dtype;
  bool has_scales;  // whether any of sum_scale, total rounding, result_scale applies
  bool has_multiplier;
  bool stream = false;
  bool prefetch_outs = false;
  Division division = Division::kNone;
  VF send_scale, sum_scale, total_scale, result_scale, divisor, multiplier;
};

// Whether multiplying by the reciprocal gives the same bits: a power of two, reciprocal normal.
bool divides_by_product(float divisor) {
  const std::uint32_t bits = magnitude_bits(divisor);
  const std::uint32_t exponent = bits >> 23;
  return (bits & 0x7fffffU) == 0 && exponent >= 1 && exponent <= 253;
}

Plan::Plan(const RowPass& pass)
    : rows(pass.rows.data()),
      row_count(pass.rows.size()),
      outs(pass.outs.data()),
      out_count(pass.outs.size()),
      add(pass.add),
      add_dtype(pass.add_dtype),
      total_dtype(pass.steps.total_dtype),
      has_scales(pass.steps.sum_scale != 1.0F || pass.steps.result_scale != 1.0F ||
                 total_dtype != Dtype::kF32),
      has_multiplier(pass.steps.multiplier != 1.0F),
      send_scale(hn::Set(DF(), pass.send_scale)),
      sum_scale(hn::Set(DF(), pass.steps.sum_scale)),
      total_scale(hn::Set(DF(), pass.steps.total_scale)),
      result_scale(hn::Set(DF(), pass.steps.result_scale)),
      divisor(hn::Set(DF(), pass.steps.divisor)),
      multiplier(hn::Set(DF(), pass.steps.multiplier)) {
  if (divides_by_product(pass.steps.divisor)) {
    division = pass.steps.divisor == 1.0F ? Division::kNone : Division::kMultiply;
    divisor = hn::Set(DF(), 1.0F / pass.steps.divisor);
  } else {
    division = Division::kDivide;
  }
}

// K vectors at a time: enough independent work to hide latencies and to fill whole cache lines.
template <class Load, std::size_t K>
HWY_INLINE void sum_block(const Plan& plan, std::size_t i, VF (&t)[K]) {
  const std::size_t lanes = hn::Lanes(DF());
  if (plan.row_count == 0) {
    for (std::size_t k = 0; k < K; ++k) t[k] = hn::Zero(DF());
    return;
  }
  for (std::size_t k = 0; k < K; ++k)
    t[k] = Load::load(plan.rows[0], i + k * lanes, plan.send_scale);
  for (std::size_t r = 1; r < plan.row_count; ++r) {
    const void* const row = plan.rows[r];
    for (std::size_t k = 0; k < K; ++k) {
      t[k] = hn::Add(t[k], Load::load(row, i + k * lanes, plan.send_scale));
    }
  }
}

template <class Load, std::size_t K>
HWY_INLINE void add_block(const void* add, std::size_t i, VF (&t)[K]) {
  const std::size_t lanes = hn::Lanes(DF());
  for (std::size_t k = 0; k < K; ++k) {
    t[k] = hn::Add(Load::load(add, i + k * lanes, hn::Zero(DF())), t[k]);
  }
}

template <std::size_t K>
HWY_INLINE void multiply_block(VF factor, VF (&t)[K]) {
  for (std::size_t k = 0; k < K; ++k) t[k] = hn::Mul(t[k], factor);
}

template <std::size_t K>
HWY_INLINE void round_total_block(const Plan& plan, VF (&t)[K]) {
  if (plan.total_dtype == Dtype::kBf16) {
    multiply_block(plan.total_scale, t);
    for (std::size_t k = 0; k < K; ++k) t[k] = round_bf16(t[k]);
  } else if (plan.total_dtype == Dtype::kF16) {
    multiply_block(plan.total_scale, t);
    for (std::size_t k = 0; k < K; ++k) t[k] = round_f16(t[k]);
  }
}

template <std::size_t K>
HWY_INLINE void finish_block(const Plan& plan, std::size_t i, VF (&t)[K]) {
  if (plan.has_scales) multiply_block(plan.sum_scale, t);
  if (plan.add != nullptr) {
    if (plan.add_dtype == Dtype::kF32) {
      add_block<LoadF32>(plan.add, i, t);
    } else if (plan.add_dtype == Dtype::kBf16) {
      add_block<LoadBf16>(plan.add, i, t);
    } else {
      add_block<LoadF16>(plan.add, i, t);
    }
  }
  if (plan.has_scales) {
    round_total_block(plan, t);
    multiply_block(plan.result_scale, t);
  }
  if (plan.division == Division::kDivide) {
    for (std::size_t k = 0; k < K; ++k) t[k] = hn::Div(t[k], plan.divisor);
  } else if (plan.division == Division::kMultiply) {
    multiply_block(plan.divisor, t);
  }
  if (plan.has_multiplier) multiply_block(plan.multiplier, t);
}

struct StoreF32 {
  static constexpr std::size_t kElementBytes = 4;

  template <std::size_t K>
  static HWY_INLINE void store(const Plan& plan, std::size_t i, const VF (&t)[K],
                               bool /*has_nan*/) {
    const std::size_t lanes = hn::Lanes(DF());
    for (std::size_t o = 0; o < plan.out_count; ++o) {
      float* const out = static_cast<float*>(plan.outs[o]) + i;
      if (K > 1 && plan.stream) {
        for (std::size_t k = 0; k < K; ++k) hn::Stream(t[k], DF(), out + k * lanes);
      } else {
        for (std::size_t k = 0; k < K; ++k) hn::StoreU(t[k], DF(), out + k * lanes);
      }
    }
  }
};

template <class Encode>
struct Store16 {
  static constexpr std::size_t kElementBytes = 2;

  static HWY_INLINE void store(const Plan& plan, std::size_t i, const VF (&t)[1],
                               bool /*has_nan*/) {
    const VH bits = Encode::encode(t[0]);
    for (std::size_t o = 0; o < plan.out_count; ++o) {
      hn::StoreU(bits, DH(), static_cast<std::uint16_t*>(plan.outs[o]) + i);
    }
  }

  template <std::size_t K>
  static HWY_INLINE void store(const Plan& plan, std::size_t i, const VF (&t)[K], bool has_nan) {
    const std::size_t lanes = hn::Lanes(DU16());
    VU16 bits[K / 2];
    if (HWY_UNLIKELY(has_nan)) {
      for (std::size_t k = 0; k < K / 2; ++k) {
        bits[k] = hn::Combine(DU16(), Encode::encode(t[2 * k + 1]), Encode::encode(t[2 * k]));
      }
    } else {
      for (std::size_t k = 0; k < K / 2; ++k)
        bits[k] = Encode::encode_numbers(t[2 * k], t[2 * k + 1]);
    }
    for (std::size_t o = 0; o < plan.out_count; ++o) {
      std::uint16_t* const out = static_cast<std::uint16_t*>(plan.outs[o]) + i;
      if (plan.stream) {
        for (std::size_t k = 0; k < K / 2; ++k) hn::Stream(bits[k], DU16(), out + k * lanes);
      } else {
        for (std::size_t k = 0; k < K / 2; ++k) hn::StoreU(bits[k], DU16(), out + k * lanes);
      }
    }
  }
};

// Prefetches the cache lines of a block of K vectors. This costs nothing on CPUs that prefetch well
// themselves, and doubles the speed of others, such as some virtual machines.
template <std::size_t K, std::size_t kElementBytes>
HWY_INLINE void prefetch_lines(const void* row, std::size_t i) {
  constexpr std::size_t kLineBytes = 64;
  constexpr std::size_t kBytes = K * hn::MaxLanes(DF()) * kElementBytes;
  const char* const block = static_cast<const char*>(row) + i * kElementBytes;
  for (std::size_t byte = 0; byte < kBytes; byte += kLineBytes) hwy::Prefetch(block + byte);
}

template <class Load, class Store, std::size_t K>
HWY_INLINE void prefetch_block(const Plan& plan, std::size_t i) {
  for (std::size_t r = 0; r < plan.row_count; ++r) {
    prefetch_lines<K, Load::kElementBytes>(plan.rows[r], i);
  }
  if (plan.add != nullptr && plan.add_dtype == Dtype::kF32) prefetch_lines<K, 4>(plan.add, i);
  if (!plan.prefetch_outs) return;
  for (std::size_t o = 0; o < plan.out_count; ++o) {
    prefetch_lines<K, Store::kElementBytes>(plan.outs[o], i);
  }
}

template <class Load, class Store, std::size_t K>
HWY_INLINE void run_block(const Plan& plan, std::size_t i, VI& largest) {
  VF t[K];
  sum_block<Load>(plan, i, t);
  finish_block(plan, i, t);
  VI block_largest = hn::Zero(DI());
  for (std::size_t k = 0; k < K; ++k) {
    const VI magnitude = hn::And(hn::BitCast(DI(), t[k]), hn::Set(DI(), 0x7fffffff));
    block_largest = hn::Max(block_largest, magnitude);
  }
  largest = hn::Max(largest, block_largest);
  const bool has_nan = !hn::AllTrue(DI(), hn::Lt(block_largest, hn::Set(DI(), 0x7f800001)));
  Store::store(plan, i, t, has_nan);
}

// Streaming two 64-byte lines per block leaves more of the core's few line buffers to the loads.
template <class Store>
constexpr bool kShortBursts = hn::MaxLanes(DF()) >= 16 && Store::kElementBytes == 4;

// Processes `span` elements from element i, the stretches side by side.
template <class Load, class Store, std::size_t K>
HWY_INLINE void run_span(const Plan& plan, std::size_t i, std::size_t span, VI& largest) {
  const std::size_t step = K * hn::Lanes(DF());
  for (std::size_t j = 0; j < kStretchElements; j += step) {
    // Past its end, a stretch continues in the next span.
    std::size_t ahead = j + kAheadElements;
    if (ahead >= kStretchElements) ahead += span - kStretchElements;
    for (std::size_t stretch = i; stretch < i + span; stretch += kStretchElements) {
      prefetch_block<Load, Store, K>(plan, stretch + ahead);
      run_block<Load, Store, K>(plan, stretch + j, largest);
    }
  }
}

// Processes as many blocks as fit from element i; returns the first element after them.
template <class Load, class Store, std::size_t K>
HWY_INLINE std::size_t run_blocks(const Plan& plan, std::size_t i, std::size_t end, VI& largest) {
  const std::size_t step = K * hn::Lanes(DF());
  const std::size_t span = stretches(plan.row_count) * kStretchElements;
  for (; i + span <= end; i += span) run_span<Load, Store, K>(plan, i, span, largest);
  const bool look_ahead = end - i >= 4 * kAheadElements;
  for (; i + step <= end; i += step) {
    if (look_ahead) prefetch_block<Load, Store, K>(plan, i + kAheadElements);
    run_block<Load, Store, K>(plan, i, largest);
  }
  return i;
}

// The first element at which all outputs are aligned to a cache line, or -1 if there is none.
std::int64_t elements_to_line(const RowPass& pass) {
  constexpr std::uintptr_t kLineBytes = 64;
  const std::uintptr_t element_bytes = pass.out_dtype == Dtype::kF32 ? 4 : 2;
  const auto offset = reinterpret_cast<std::uintptr_t>(pass.outs[0]) % kLineBytes;
  for (void* const out : pass.outs) {
    if (reinterpret_cast<std::uintptr_t>(out) % kLineBytes != offset) return -1;
  }
  if (offset % element_bytes != 0) return -1;
  return static_cast<std::int64_t>((kLineBytes - offset) % kLineBytes / element_bytes);
}

template <class Load, class Store>
HWY_NOINLINE std::uint32_t run_loop(const RowPass& pass) {
  Plan plan(pass);
  std::int64_t head = 0;
  if (pass.streaming_stores) {
    head = elements_to_line(pass);
    plan.stream = head >= 0 && head < pass.count;
    head = plan.stream ? head : 0;
  }
  std::uint32_t scalar_largest = run_scalar_range(pass, 0, head);
  const std::size_t lanes = hn::Lanes(DF());
  const auto end = static_cast<std::size_t>(pass.count);
  auto i = static_cast<std::size_t>(head);
  VI largest = hn::Zero(DI());
  plan.prefetch_outs = !plan.stream && end * Store::kElementBytes >= kLargeOutputBytes;
  if (plan.stream && kShortBursts<Store>) {
    i = run_blocks<Load, Store, 2>(plan, i, end, largest);
  } else {
    i = run_blocks<Load, Store, 4>(plan, i, end, largest);
  }
  for (; i + lanes <= end; i += lanes) run_block<Load, Store, 1>(plan, i, largest);
  const std::uint32_t tail_largest =
      run_scalar_range(pass, static_cast<std::int64_t>(i), pass.count);
  if (tail_largest > scalar_largest) scalar_largest = tail_largest;
  if (plan.stream) hwy::FlushStream();
  alignas(64) std::int32_t each[hn::MaxLanes(DI())];
  hn::StoreU(largest, DI(), each);
  for (std::size_t k = 0; k < lanes; ++k) {
    const auto magnitude = static_cast<std::uint32_t>(each[k]);
    if (magnitude > scalar_largest) scalar_largest = magnitude;
  }
  return scalar_largest;
}

template <class Load>
std::uint32_t run_loop_for(const RowPass& pass) {
  if (pass.out_dtype == Dtype::kBf16) return run_loop<Load, Store16<EncodeBf16> >(pass);
  if (pass.out_dtype == Dtype::kF16) return run_loop<Load, Store16<EncodeF16> >(pass);
  return run_loop<Load, StoreF32>(pass);
}

std::uint32_t run_simd(const RowPass& pass) {
  if (pass.row_dtype == Dtype::kBf16) return run_loop_for<LoadBf16>(pass);
  if (pass.row_dtype == Dtype::kF16) return run_loop_for<LoadF16>(pass);
  if (pass.wire_dtype == Dtype::kBf16) return run_loop_for<LoadSentBf16>(pass);
  if (pass.wire_dtype == Dtype::kF16) return run_loop_for<LoadSentF16>(pass);
  return run_loop_for<LoadF32>(pass);
}

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace hsdp::kernels {

HWY_EXPORT(run_simd);

std::uint32_t run(const RowPass& pass) {
  if (pass.outs.empty() || pass.count <= 0) return 0;
  if (simd_choice().scalar || is_wide(pass)) return run_scalar(pass);
  const DefaultFloatEnvironment environment;
  return HSDP_SIMD_DISPATCH(run_simd)(pass);
}

}  // namespace hsdp::kernels

#endif  // HWY_ONCE
