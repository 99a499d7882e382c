// Every SIMD target against the scalar definition, and the promises of that definition.
#include "quant/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "hsdp/error.h"
#include "quant/group_arithmetic.h"
#include "quantize_setting.h"
#include "quantized_memory.h"
#include "tests/kernels/caller_environment.h"
#include "tests/kernels/kernel_test_data.h"

namespace hsdp::quant {
namespace {

// Outputs of a kernel, and of the definition for the same inputs.
struct Outputs {
  Outputs(const GroupMap& map, const MessageLayout& layout, const ErrorMemory& error)
      : message(static_cast<std::size_t>(layout.cut().count())),
        after(error),
        figures(map.tiles().size()) {}
  Guarded<std::byte> message;
  ErrorMemory after;
  std::vector<TileFigures> figures;
  std::atomic<std::uint32_t> nonfinite{0};
};

// Runs the kernel and the definition, one of them in a changed floating-point environment.
std::string run_both(Quantize args, const GroupMap& map, const MessageLayout& layout,
                     const ErrorMemory& before, std::mt19937& random) {
  const bool in_place = random() % 2 == 0;
  const bool spoils_the_kernel = random() % 2 == 0;
  Outputs found(map, layout, before);
  Outputs expected(map, layout, before);
  ErrorMemory apart = before;
  for (Outputs* const out : {&found, &expected}) {
    args.before = in_place ? out->after.state() : apart.state();
    args.after = out->after.state();
    args.out = {layout.format(), out->message.data(), 0, layout.rows().data()};
    args.figures = out->figures.data();
    args.nonfinite = &out->nonfinite;
    const bool is_kernel = out == &found;
    kernels::run_in_environment(is_kernel == spoils_the_kernel,
                                [&] { is_kernel ? quantize(args) : quantize_reference(args); });
  }
  if (std::string text = difference(found.message, expected.message, "byte"); !text.empty()) {
    return text;
  }
  if (found.nonfinite != expected.nonfinite) return "the flags differ";
  for (std::size_t t = 0; t < found.figures.size(); ++t) {
    const double wanted = expected.figures[t].wanted;
    if (!std::isfinite(wanted) || wanted < 1e-30) continue;  // fp32 products
    if (std::abs(found.figures[t].wanted - wanted) > 1e-4 * wanted ||
        std::abs(found.figures[t].missed - expected.figures[t].missed) > 1e-4 * wanted) {
      return "figures of tile " + std::to_string(t);
    }
  }
  return error_difference(found.after, expected.after);
}

std::string to_text(const Setting& setting, int round) {
  return "round " + std::to_string(round) + ": " + std::string(name(setting.format.code)) + " in " +
         std::to_string(setting.format.group_size) + ", scales " +
         std::string(hsdp::name(setting.format.scale_dtype)) + ", error " +
         std::to_string(static_cast<int>(setting.kind)) + (setting.has_dither ? " dithered" : "");
}

using QuantizeOn = kernels::OnTarget;

TEST_P(QuantizeOn, EqualsTheDefinition) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const Setting setting(random);
    const MessageLayout layout(setting.map, setting.format);
    const auto kind = static_cast<unsigned>(random() % 5);
    Guarded<float> values(static_cast<std::size_t>(setting.span));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = some_value(random, kind);
    ErrorMemory before(setting.map, setting.kind);
    fill_random(before, random);
    const Quantize args{.tiles = setting.map.tiles(),
                        .group_size = setting.format.group_size,
                        .values = values.data(),
                        .factor = std::vector{1.0F, 0.25F, 1.0F / 3.0F, -0.1F}[random() % 4],
                        .beta = setting.beta,
                        .dither = setting.has_dither ? &setting.dither : nullptr};
    ASSERT_EQ(run_both(args, setting.map, layout, before, random), "") << to_text(setting, round);
  }
}

// Received messages of some owner, summed and quantized again, in int4, int8 and bf16.
TEST_P(QuantizeOn, OfSumsEqualsTheDefinition) {
  std::mt19937 random(8);
  for (int round = 0; round < 200; ++round) {
    Setting setting(random);
    const MessageLayout received(setting.map, setting.format);
    const int count = random() % 16 == 0 ? 100 : 1 + static_cast<int>(random() % 5);
    Guarded<std::byte> messages(static_cast<std::size_t>(count * received.cut().count()));
    ReceivedMessages rows{{setting.format, messages.data(), 0, received.rows().data()},
                          received.cut().count(),
                          count};
    Guarded<float> values(static_cast<std::size_t>(setting.span));
    const auto kind = static_cast<unsigned>(random() % 5);
    for (int r = 0; r < count; ++r) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = some_value(random, kind);
      quantize_reference({.tiles = setting.map.tiles(),
                          .group_size = setting.format.group_size,
                          .values = values.data(),
                          .out = rows.at(r)});
    }
    const int owner = static_cast<int>(random() % static_cast<unsigned>(setting.map.owners()));
    rows.first.begin = received.cut().begin(owner);  // an owner receives only its row
    rows.first.data += rows.first.begin;
    GroupFormat format = setting.format;
    format.code = static_cast<Code>(random() % 3);
    if (format.code == Code::kBf16) setting.kind = ErrorKind::kNone;
    const MessageLayout layout(setting.map, format);
    ErrorMemory before(setting.map, setting.kind);
    fill_random(before, random);
    const Quantize args{.tiles = setting.map.tiles(owner),
                        .group_size = format.group_size,
                        .received = rows,
                        .beta = setting.beta,
                        .dither = setting.kind == ErrorKind::kInt8 && setting.has_dither
                                      ? &setting.dither
                                      : nullptr};
    ASSERT_EQ(run_both(args, setting.map, layout, before, random), "")
        << to_text(setting, round) << " from " << count << " to " << name(format.code);
  }
}

// One message, or the sum of several, of an owner's groups.
TEST_P(QuantizeOn, AndBackEqualsTheDefinition) {
  std::mt19937 random(9);
  for (int round = 0; round < 300; ++round) {
    const Setting setting(random);
    GroupFormat format = setting.format;
    format.code = static_cast<Code>(random() % 3);
    const int count = format.code == Code::kBf16 ? 1 : 1 + static_cast<int>(random() % 5);
    const MessageLayout layout(setting.map, format);
    const std::int64_t size = layout.cut().count();
    Guarded<std::byte> messages(static_cast<std::size_t>(count * size));
    const auto kind = static_cast<unsigned>(random() % 5);
    const bool is_made = format.code != Code::kBf16 && random() % 2 == 0;
    if (is_made) {
      Guarded<float> values(static_cast<std::size_t>(setting.span));
      for (int r = 0; r < count; ++r) {
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = some_value(random, kind);
        quantize_reference({.tiles = setting.map.tiles(),
                            .group_size = format.group_size,
                            .values = values.data(),
                            .out = {format, messages.data() + r * size, 0, layout.rows().data()}});
      }
    } else {
      for (std::size_t i = 0; i < messages.size(); ++i) {  // any bits are a valid message
        messages[i] = static_cast<std::byte>(random());
      }
    }
    const int owner = static_cast<int>(random() % static_cast<unsigned>(setting.map.owners()));
    const std::span<const GroupTile> tiles = setting.map.tiles(owner);
    const std::int64_t begin = tiles.empty() ? 0 : tiles.front().element;
    const std::int64_t end = tiles.empty() ? 0 : tiles.back().element + tiles.back().count;
    Guarded<float> found(static_cast<std::size_t>(end - begin));
    Guarded<float> expected(static_cast<std::size_t>(end - begin));
    std::atomic<std::uint32_t> flags[2] = {};
    Dequantize args{.tiles = tiles,
                    .group_size = format.group_size,
                    .in = {{format, messages.data(), 0, layout.rows().data()}, size, count},
                    .values = found.data(),
                    .begin = begin,
                    .nonfinite = &flags[0]};
    const bool spoils_the_kernel = random() % 2 == 0;
    kernels::run_in_environment(spoils_the_kernel, [&] { dequantize(args); });
    args.values = expected.data();
    args.nonfinite = &flags[1];
    kernels::run_in_environment(!spoils_the_kernel, [&] { dequantize_reference(args); });
    ASSERT_EQ(difference(found, expected, "element"), "")
        << to_text(setting, round) << " from " << count;
    if (is_made || format.code == Code::kBf16) {  // others may have too large a scale
      EXPECT_EQ(flags[0], flags[1]) << to_text(setting, round) << " from " << count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, QuantizeOn, ::testing::ValuesIn(kernels::simd_targets()),
                         kernels::target_name);

// Quantizes and restores a group of 64 with these first elements.
std::vector<float> sent(const std::vector<float>& first, const GroupFormat& format,
                        bool* marked = nullptr) {
  std::vector<float> values(64);
  std::copy(first.begin(), first.end(), values.begin());
  const std::vector<ParameterRange> runs{{.count = 64}};
  const GroupMap map(runs, format.group_size, 1);
  const MessageLayout layout(map, format);
  std::vector<std::byte> bytes(static_cast<std::size_t>(layout.cut().count()));
  const Message message{format, bytes.data(), 0, layout.rows().data()};
  std::atomic<std::uint32_t> flag = 0;
  quantize({.tiles = map.tiles(),
            .group_size = format.group_size,
            .values = values.data(),
            .out = message,
            .nonfinite = &flag});
  std::vector<float> back(64);
  dequantize({.tiles = map.tiles(),
              .group_size = format.group_size,
              .in = {.first = message, .count = 1},
              .values = back.data()});
  if (marked != nullptr) *marked = flag != 0;
  return back;
}

TEST(Codec, KeepsTheExtremes) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (const Code code : kIntegers) {
    const float levels = code == Code::kInt4 ? 7.0F : 127.0F;
    for (const float top : {1e-30F, 1.0F, 3e38F}) {
      const std::vector<float> back = sent({top, -top}, {code, 64, Dtype::kF32});
      EXPECT_NEAR(back[0] / top, 1.0, 1e-6);
      EXPECT_EQ(back[0], -back[1]);
    }
    for (const Dtype scale : {Dtype::kF32, Dtype::kBf16}) {
      for (const float extreme : sent({kLargest, -kLargest}, {code, 64, scale})) {
        EXPECT_TRUE(std::isfinite(extreme));
      }
      for (int k = 1; k < 300; ++k) {  // a scale may become zero, but no code too large
        const float tiny = std::bit_cast<float>(k);
        EXPECT_LE(sent({tiny}, {code, 64, scale})[0], tiny + levels * 0x1p-133F);
      }
    }
  }
}

// The code of a group's largest element never exceeds the levels: its product with the inverse is
// one of these, whatever the exponent.
TEST(Codec, NeedsNoClampForAnySignificand) {
  for (const Code code : kIntegers) {
    for (const Dtype scale_dtype : {Dtype::kF32, Dtype::kBf16}) {
      const ScalingRule rule = scaling_rule(code, scale_dtype);
      for (std::uint32_t significand = 0; significand < 1U << 23; ++significand) {
        const std::uint32_t bits = 0x3f800000U | significand;
        const float top = std::bit_cast<float>(bits);
        const GroupScaling scaling = scaling_of(bits, rule);
        const std::int32_t most = code_of(top, scaling, 127.5F * 0x1p-8F);
        if (most != static_cast<std::int32_t>(rule.levels)) FAIL() << top << " gets " << most;
      }
    }
  }
}

TEST(Codec, RoundsTiesToEvenAndHasOneZero) {
  const std::vector<float> back =
      sent({7.0F, -7.0F, 0.5F, 1.5F, -0.5F, -0.0F}, {Code::kInt4, 64, Dtype::kF32});
  EXPECT_EQ(back[2], 0.0F);
  EXPECT_EQ(back[3], 2.0F);
  EXPECT_FALSE(std::signbit(back[4]));
  EXPECT_FALSE(std::signbit(back[5]));
  for (const float zero : sent({}, {})) EXPECT_EQ(std::bit_cast<std::uint32_t>(zero), 0U);
}

TEST(Codec, MarksTheGroupThatIsNotFiniteAlone) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    bool marked = false;
    const std::vector<float> back = sent({1.0F, bad}, {.group_size = 32}, &marked);
    EXPECT_TRUE(marked);
    for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(std::isnan(back[i]), i < 32);
  }
}

// A group of 64 that begins with one number from each message: returns what becomes of their sum.
float sum_of_sent(const std::vector<float>& numbers, bool* nonfinite = nullptr) {
  const std::vector<ParameterRange> runs{{.count = 64}};
  const GroupMap map(runs, 64, 1);
  constexpr GroupFormat kFormat{.code = Code::kInt8, .scale_dtype = Dtype::kF32};
  const MessageLayout layout(map, kFormat);
  const std::int64_t size = layout.cut().count();
  std::vector<std::byte> bytes(numbers.size() * static_cast<std::size_t>(size));
  const ReceivedMessages messages{{kFormat, bytes.data(), 0, layout.rows().data()},
                                  size,
                                  static_cast<int>(std::ssize(numbers))};
  for (std::size_t r = 0; r < numbers.size(); ++r) {
    std::vector<float> values(64);
    values[0] = numbers[r];
    quantize(
        {.tiles = map.tiles(), .values = values.data(), .out = messages.at(static_cast<int>(r))});
  }
  std::atomic<std::uint32_t> flag = 0;
  std::vector<float> sums(64);
  dequantize({.tiles = map.tiles(), .in = messages, .values = sums.data(), .nonfinite = &flag});
  if (nonfinite != nullptr) *nonfinite = flag != 0;
  return sums[0];
}

TEST(Codec, SumsMessagesInTheirOrder) {
  constexpr float kLarge = 127.0F * 0x1p24F;  // an int8 code times a power of two: exact
  EXPECT_EQ(sum_of_sent({kLarge, 127.0F, -kLarge}), 128.0F);
  EXPECT_EQ(sum_of_sent({kLarge, -kLarge, 127.0F}), 127.0F);
  bool nonfinite = false;
  EXPECT_EQ(sum_of_sent({1.0F}, &nonfinite), 1.0F);
  EXPECT_FALSE(nonfinite);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isnan(sum_of_sent({1.0F, kInfinity, 1.0F}, &nonfinite)));  // marked
  EXPECT_TRUE(nonfinite);
  nonfinite = false;
  EXPECT_EQ(sum_of_sent({3e38F, 3e38F}, &nonfinite), kInfinity);  // no message is marked
  EXPECT_TRUE(nonfinite);
}

TEST(Quantize, RefusesWhatMakesNoSense) {
  const std::vector<ParameterRange> runs{{.count = 64}};
  const GroupMap map(runs, 64, 1);
  const MessageLayout layout(map, {});
  std::vector<std::byte> bytes(static_cast<std::size_t>(layout.cut().count()));
  std::vector<float> values(64);
  const Quantize good{.tiles = map.tiles(),
                      .values = values.data(),
                      .out = {{}, bytes.data(), 0, layout.rows().data()}};
  EXPECT_NO_THROW(quantize(good));
  const std::pair<const char*, std::function<void(Quantize&)>> faults[] = {
      {"no values", [](Quantize& args) { args.values = nullptr; }},
      {"another group size", [](Quantize& args) { args.group_size = 32; }},
      {"no error after", [&](Quantize& args) { args.before.values = values.data(); }},
      {"errors of bf16",
       [&](Quantize& args) {
         args.out.format.code = Code::kBf16;
         args.before.values = args.after.values = values.data();
       }},
  };
  for (const auto& [label, spoil] : faults) {
    Quantize args = good;
    spoil(args);
    EXPECT_THROW(quantize(args), UsageError) << label;
  }
  Dequantize back{.tiles = map.tiles(), .in = {good.out, 0, 1}, .values = values.data()};
  EXPECT_NO_THROW(dequantize(back));
  back.in.count = 0;
  EXPECT_THROW(dequantize(back), UsageError);
  back.in.count = 2;
  back.in.first.format.code = Code::kBf16;
  EXPECT_THROW(dequantize(back), UsageError);
}

}  // namespace
}  // namespace hsdp::quant
