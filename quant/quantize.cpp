#include "quant/quantize.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/float_environment.h"
#include "quant/group_arithmetic.h"
#include "quant/quantize_kernels.h"
#include "quant/quantize_tile.h"

namespace hsdp::quant {
namespace {

template <class T>
T loaded(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(const T& value, void* to) {
  std::memcpy(to, &value, sizeof value);
}

float loaded_scale(const std::byte* from, Dtype dtype) {
  return dtype == Dtype::kF32 ? loaded<float>(from) : to_float(loaded<Bf16>(from));
}

void store_scale(float scale, std::byte* to, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    store(scale, to);
  } else {
    store(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(scale) >> 16), to);
  }
}

std::int32_t loaded_code(const std::byte* codes, std::int32_t i, Code code) {
  if (code == Code::kInt8) return loaded<std::int8_t>(codes + i);
  const auto pair = std::to_integer<std::int32_t>(codes[i / 2]);
  return (pair >> (i % 2 * 4) & 15) - 8;
}

void store_codes(const std::int32_t* codes, std::int32_t count, Code code, std::byte* to) {
  std::memset(to, 0, static_cast<std::size_t>(code_bytes(code, count)));
  for (std::int32_t i = 0; i < count; ++i) {
    if (code == Code::kInt8) {
      store(static_cast<std::int8_t>(codes[i]), to + i);
    } else {
      to[i / 2] |= static_cast<std::byte>((codes[i] + 8) << (i % 2 * 4));
    }
  }
}

// Where a group's error lies.
struct ErrorGroup {
  ErrorGroup(const ErrorState& state, const GroupTile& tile, const TileGroup& group)
      : state_(state),
        element_(tile.position - state.position + group.begin),
        group_(tile.group - state.group + group.number) {}

  [[nodiscard]] float at(std::int32_t i) const {
    if (state_.values != nullptr) return state_.values[element_ + i];
    return decoded(state_.codes[element_ + i], state_.scales[group_]);
  }
  void set(const float* errors, const float* dither, std::int32_t count) const {
    if (state_.values != nullptr) {
      std::copy_n(errors, count, state_.values + element_);
      return;
    }
    std::uint32_t top = 0;
    for (std::int32_t i = 0; i < count; ++i) top = std::max(top, magnitude_bits(errors[i]));
    const GroupScaling scaling = scaling_of(top, scaling_rule(Code::kInt8, Dtype::kF32));
    state_.scales[group_] = scaling.scale;
    for (std::int32_t i = 0; i < count; ++i) {
      std::int32_t code = 0;
      if (top < kInfinityBits) {
        code = dither == nullptr ? code_of(errors[i], scaling)
                                 : code_of(errors[i], scaling, dither[i]);
      }
      state_.codes[element_ + i] = static_cast<std::int8_t>(code);
    }
  }

 private:
  const ErrorState& state_;
  std::int64_t element_;
  std::int64_t group_;
};

using GroupValues = std::array<float, kMostGroupSize>;

void sum_group(const ReceivedMessages& messages, const GroupTile& tile, const TileGroup& group,
               float* sums) {
  for (int r = 0; r < messages.count; ++r) {
    const Message message = messages.at(r);
    const TilePlace place = place_of(message, tile);
    const std::byte* const codes = place.codes_of(group.number);
    const float scale = loaded_scale(place.scale_of(group.number), message.format.scale_dtype);
    for (std::int32_t i = 0; i < group.count; ++i) {
      const float value = decoded(loaded_code(codes, i, message.format.code), scale);
      sums[i] = r == 0 ? value : sums[i] + value;
    }
  }
}

// What is quantized, without its error.
void read_group(const Quantize& args, const GroupTile& tile, const TileGroup& group,
                GroupValues& h) {
  if (args.values == nullptr) return sum_group(args.received, tile, group, h.data());
  for (std::int32_t i = 0; i < group.count; ++i) {
    h[static_cast<std::size_t>(i)] = args.values[tile.element + group.begin + i] * args.factor;
  }
}

}  // namespace

bool quantize_group(const Quantize& args, const GroupTile& tile, const TileGroup& group,
                    TileFigures* figures) {
  GroupValues h;
  read_group(args, tile, group, h);
  const auto count = static_cast<std::size_t>(group.count);
  const TilePlace to = place_of(args.out, tile);
  std::byte* const out = to.codes_of(group.number);
  const Code code = args.out.format.code;
  const auto note = [figures](double missed, double wanted) {
    if (figures == nullptr) return;
    figures->missed += missed * missed;
    figures->wanted += wanted * wanted;
  };
  if (code == Code::kBf16) {
    bool marked = false;
    for (std::size_t i = 0; i < count; ++i) {
      const Bf16 bits = to_bf16(h[i]);
      store(bits, out + 2 * i);
      const bool finite = magnitude_bits(to_float(bits)) < kInfinityBits;
      marked |= !finite;
      if (finite) note(static_cast<double>(h[i]) - to_float(bits), h[i]);
    }
    return marked;
  }
  const bool feeds_back = args.before.exists();
  const ErrorGroup before(args.before, tile, group);
  std::uint32_t top = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (feeds_back) h[i] = h[i] + before.at(static_cast<std::int32_t>(i));
    top = std::max(top, magnitude_bits(h[i]));
  }
  const GroupScaling scaling = scaling_of(top, scaling_rule(code, args.out.format.scale_dtype));
  const bool marked = top >= kInfinityBits;
  std::array<std::int32_t, kMostGroupSize> codes;
  GroupValues errors;
  GroupValues dithers;
  const float take = 1.0F - args.beta;
  for (std::size_t i = 0; i < count; ++i) {
    const auto place = static_cast<std::int32_t>(i);
    codes[i] = marked ? 0 : code_of(h[i], scaling);
    const float d = decoded(codes[i], scaling.scale);
    if (!marked) note(static_cast<double>(h[i]) - d, h[i]);
    if (!feeds_back) continue;
    errors[i] = next_error(before.at(place), h[i], d, args.beta, take);
    if (args.dither == nullptr) continue;
    const std::int64_t flat = tile.flat_offset + group.begin + place;
    dithers[i] = dither_of(dither_words(*args.dither, tile.parameter, flat),
                           static_cast<int>(flat % kDitherElements));
  }
  store_scale(scaling.scale, to.scale_of(group.number), args.out.format.scale_dtype);
  store_codes(codes.data(), group.count, code, out);
  if (feeds_back) {
    ErrorGroup(args.after, tile, group)
        .set(errors.data(), args.dither == nullptr ? nullptr : dithers.data(), group.count);
  }
  return marked;
}

bool dequantize_group(const Dequantize& args, const GroupTile& tile, const TileGroup& group) {
  float* const values = args.values + (tile.element - args.begin) + group.begin;
  if (args.in.first.format.code == Code::kBf16) {
    const std::byte* const from = place_of(args.in.first, tile).codes_of(group.number);
    for (std::int32_t i = 0; i < group.count; ++i) {
      values[i] = to_float(loaded<Bf16>(from + 2 * static_cast<std::ptrdiff_t>(i)));
    }
  } else {
    sum_group(args.in, tile, group, values);
  }
  return std::any_of(values, values + group.count,
                     [](float value) { return magnitude_bits(value) >= kInfinityBits; });
}

namespace {

void require(bool holds, const char* kernel, const char* expected, const std::string& got) {
  if (holds) return;
  throw UsageError({.where = std::string("quant: ") + kernel, .expected = expected, .got = got});
}

void check(const Quantize& args) {
  constexpr const char* kName = "quantize";
  require_valid(args.out.format);
  require(args.out.format.group_size == args.group_size, kName, "a message of its group size",
          std::to_string(args.out.format.group_size));
  require((args.values != nullptr) != (args.received.count > 0), kName,
          "either values or received messages", args.values == nullptr ? "neither" : "both");
  if (args.received.count > 0) {
    const GroupFormat& format = args.received.first.format;
    require_valid(format);
    require(format.code != Code::kBf16 && format.group_size == args.group_size, kName,
            "received messages of integers in its group size",
            std::string(name(format.code)) + " in groups of " + std::to_string(format.group_size));
  }
  require(args.before.exists() == args.after.exists() &&
              (args.before.codes == nullptr) == (args.after.codes == nullptr),
          kName, "an error before and after of one kind", "two");
  require(!(args.before.exists() && args.out.format.code == Code::kBf16), kName,
          "no error state with bf16", "one");
}

void check(const Dequantize& args) {
  constexpr const char* kName = "dequantize";
  const GroupFormat& format = args.in.first.format;
  require_valid(format);
  require(format.group_size == args.group_size, kName, "a message of its group size",
          std::to_string(format.group_size));
  require(args.in.count == 1 || (args.in.count > 1 && format.code != Code::kBf16), kName,
          "one message, or several of integers",
          std::to_string(args.in.count) + " of " + std::string(name(format.code)));
}

void set(std::atomic<std::uint32_t>* flag, bool marked) {
  if (marked && flag != nullptr) flag->store(1, std::memory_order_relaxed);
}

}  // namespace

bool quantize_scalar(const Quantize& args) {
  bool marked = false;
  for (std::size_t t = 0; t < args.tiles.size(); ++t) {
    const GroupTile& tile = args.tiles[t];
    TileFigures* const figures = args.figures == nullptr ? nullptr : args.figures + t;
    if (figures != nullptr) *figures = {};
    const std::int32_t groups = group_count(tile, args.group_size);
    for (std::int32_t g = 0; g < groups; ++g) {
      marked |= quantize_group(args, tile, group_of(tile, args.group_size, g), figures);
    }
    write_fillers(args.out, tile, groups);
  }
  return marked;
}

bool dequantize_scalar(const Dequantize& args) {
  bool marked = false;
  for (const GroupTile& tile : args.tiles) {
    const std::int32_t groups = group_count(tile, args.group_size);
    for (std::int32_t g = 0; g < groups; ++g) {
      marked |= dequantize_group(args, tile, group_of(tile, args.group_size, g));
    }
  }
  return marked;
}

namespace {

// Opaque to the compiler: see DefaultFloatEnvironment.
bool (*volatile scalar_quantize)(const Quantize&) = quantize_scalar;
bool (*volatile scalar_dequantize)(const Dequantize&) = dequantize_scalar;

}  // namespace

void quantize_reference(const Quantize& args) {
  check(args);
  const kernels::DefaultFloatEnvironment environment;
  set(args.nonfinite, scalar_quantize(args));
}

void dequantize_reference(const Dequantize& args) {
  check(args);
  const kernels::DefaultFloatEnvironment environment;
  set(args.nonfinite, scalar_dequantize(args));
}

void quantize(const Quantize& args) {
  check(args);
  set(args.nonfinite, quantize_simd(args));
}

void dequantize(const Dequantize& args) {
  check(args);
  set(args.nonfinite, dequantize_simd(args));
}

void quantize(const Quantize& args, const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) {
    quantize(args);
  } else {
    check(args);
    quantize_on_device(args, stream);
  }
}

void dequantize(const Dequantize& args, const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) {
    dequantize(args);
  } else {
    check(args);
    dequantize_on_device(args, stream);
  }
}

}  // namespace hsdp::quant
