// The scalar definition and every SIMD target against bytes that were written down once
// (docs/quant_format.md says how).
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "quant/quantize.h"
#include "quantized_memory.h"
#include "tests/kernels/kernel_test_data.h"

namespace hsdp::quant {
namespace {

using Fields = std::map<std::string, std::vector<std::string>>;

std::vector<Fields> golden_cases() {
  std::ifstream file(HSDP_GOLDEN);
  std::vector<Fields> cases;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name.empty() || name == "#") continue;
    if (name == "case") cases.emplace_back();
    std::vector<std::string>& values = cases.back()[name];
    for (std::string word; words >> word;) values.push_back(word);
  }
  return cases;
}

template <class T>
std::vector<T> from_hex(const std::string& text) {
  std::vector<T> values(text == "-" ? 0 : text.size() / 2 / sizeof(T));
  auto* const bytes = reinterpret_cast<unsigned char*>(values.data());
  for (std::size_t i = 0; i < values.size() * sizeof(T); ++i) {
    bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return values;
}

template <class T>
void fill(Guarded<T>& memory, const std::string& hex) {
  const std::vector<T> values = from_hex<T>(hex);
  ASSERT_EQ(values.size(), memory.size());
  std::copy(values.begin(), values.end(), memory.data());
}

void fill_error(ErrorMemory& error, const std::vector<std::string>& hex) {
  if (error.kind == ErrorKind::kInt8) {
    fill(error.codes, hex.at(0));
    fill(error.scales, hex.at(1));
  } else if (error.kind == ErrorKind::kF32) {
    fill(error.values, hex.at(0));
  }
}

struct GoldenCase {
  explicit GoldenCase(const Fields& fields)
      : number(fields.at("case")[0]),
        format{.code = fields.at("format")[0] == "int4" ? Code::kInt4 : Code::kInt8,
               .group_size = std::stoi(fields.at("format")[1]),
               .scale_dtype = parse_dtype(fields.at("format")[2])},
        map(runs_of(fields), format.group_size, std::stoi(fields.at("owners")[0])),
        layout(map, format),
        kind(fields.at("error")[0] == "none"   ? ErrorKind::kNone
             : fields.at("error")[0] == "int8" ? ErrorKind::kInt8
                                               : ErrorKind::kF32),
        before(map, kind),
        after(map, kind),
        values(static_cast<std::size_t>(map.element_count())),
        decoded(values.size()),
        message(static_cast<std::size_t>(layout.cut().count())) {
    args.tiles = map.tiles();
    args.group_size = format.group_size;
    args.factor = from_hex<float>(fields.at("factor")[0])[0];
    args.beta = from_hex<float>(fields.at("beta")[0])[0];
    fill(values, fields.at("values")[0]);
    fill(decoded, fields.at("decoded")[0]);
    fill(message, fields.at("message")[0]);
    if (kind != ErrorKind::kNone) {
      fill_error(before, fields.at("before"));
      fill_error(after, fields.at("after"));
    }
    if (const auto numbers = fields.find("dither"); numbers != fields.end()) {
      dither = {std::stoull(numbers->second[0]),
                static_cast<std::uint32_t>(std::stoul(numbers->second[1])),
                static_cast<std::uint32_t>(std::stoul(numbers->second[2]))};
      args.dither = &dither;
    }
    std::int64_t offset = 0;
    for (int owner = 0; owner < map.owners(); ++owner) {
      EXPECT_EQ(layout.cut().begin(owner), offset);
      offset += std::stoll(fields.at("rows").at(static_cast<std::size_t>(owner)));
    }
    EXPECT_EQ(layout.cut().count(), offset);
  }

  static std::vector<ParameterRange> runs_of(const Fields& fields) {
    std::vector<ParameterRange> runs;
    std::int64_t offset = 0;
    for (const std::string& text : fields.at("runs")) {
      std::istringstream numbers(text);
      ParameterRange run;
      char colon = 0;
      numbers >> run.parameter >> colon >> run.flat_offset >> colon >> run.count;
      run.offset = offset;
      offset += run.count;
      runs.push_back(run);
    }
    return runs;
  }

  void check(void (*quantize_kernel)(const Quantize&),
             void (*dequantize_kernel)(const Dequantize&)) {
    SCOPED_TRACE("case " + number);
    ErrorMemory next(map, kind);
    Guarded<std::byte> sent(message.size());
    std::atomic<std::uint32_t> nonfinite = 0;
    args.values = values.data();
    args.before = before.state();
    args.after = next.state();
    args.out = {format, sent.data(), 0, layout.rows().data()};
    args.nonfinite = &nonfinite;
    quantize_kernel(args);
    EXPECT_TRUE(sent.guards_hold());
    EXPECT_EQ(std::memcmp(sent.data(), message.data(), message.size()), 0) << "the message";
    EXPECT_EQ(difference(next, after), "");
    Guarded<float> back(values.size());
    std::atomic<std::uint32_t> nan_seen = 0;
    dequantize_kernel({.tiles = map.tiles(),
                       .group_size = format.group_size,
                       .in = {format, message.data(), 0, layout.rows().data()},
                       .values = back.data(),
                       .nonfinite = &nan_seen});
    EXPECT_EQ(difference(back, decoded, "decoded element"), "");
    bool has_nan = false;
    for (std::size_t i = 0; i < decoded.size(); ++i) has_nan |= std::isnan(decoded[i]);
    EXPECT_EQ(nonfinite, has_nan ? 1U : 0U);
    EXPECT_EQ(nan_seen, has_nan ? 1U : 0U);
  }

  std::string number;
  GroupFormat format;
  GroupMap map;
  MessageLayout layout;
  ErrorKind kind;
  ErrorMemory before;
  ErrorMemory after;
  Guarded<float> values;
  Guarded<float> decoded;
  Guarded<std::byte> message;
  Quantize args;
  Dither dither;
};

using GoldenOn = kernels::OnTarget;

TEST_P(GoldenOn, IsWhatTheDefinitionAndTheKernelsGive) {
  const std::vector<Fields> cases = golden_cases();
  ASSERT_GT(cases.size(), 40U);
  for (const Fields& fields : cases) {
    GoldenCase(fields).check(quantize_reference, dequantize_reference);
    GoldenCase(fields).check(quantize, dequantize);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, GoldenOn, ::testing::ValuesIn(kernels::simd_targets()),
                         kernels::target_name);

TEST(Philox, GivesTheKnownAnswers) {
  const PhiloxWords zero = philox({{0, 0, 0, 0}}, 0);
  EXPECT_EQ(zero.words[0], 0x6627e8d5U);
  EXPECT_EQ(zero.words[3], 0x9b00dbd8U);
  constexpr std::uint32_t kAll = 0xffffffffU;
  const PhiloxWords ones = philox({{kAll, kAll, kAll, kAll}}, 0xffffffffffffffffU);
  EXPECT_EQ(ones.words[0], 0x408f276dU);
  EXPECT_EQ(ones.words[3], 0x6d5451fdU);
}

}  // namespace
}  // namespace hsdp::quant
