// The scalar definition and every SIMD target against recorded bytes. docs/quant_format.md says how
// they were recorded.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <optional>
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
  if (error.kind == ErrorKind::kF32) {
    fill(error.values, hex.at(0));
  } else {
    fill(error.codes, hex.at(0));
    fill(error.scales, hex.at(1));
  }
}

std::vector<ParameterRange> runs_of(const Fields& fields) {
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

void check(const Fields& fields, void (*quantize_kernel)(const Quantize&),
           void (*dequantize_kernel)(const Dequantize&)) {
  const auto text = [&](const char* field, std::size_t i = 0) { return fields.at(field).at(i); };
  SCOPED_TRACE("case " + text("case"));
  const GroupFormat format{.code = text("format") == "int4" ? Code::kInt4 : Code::kInt8,
                           .group_size = std::stoi(text("format", 1)),
                           .scale_dtype = parse_dtype(text("format", 2))};
  const GroupMap map(runs_of(fields), format.group_size, std::stoi(text("owners")));
  const MessageLayout layout(map, format);
  std::int64_t offset = 0;
  for (int owner = 0; owner < map.owners(); ++owner) {
    EXPECT_EQ(layout.cut().begin(owner), offset);
    offset += std::stoll(text("rows", static_cast<std::size_t>(owner)));
  }
  ASSERT_EQ(layout.cut().count(), offset);
  const std::map<std::string, ErrorKind> kinds{
      {"none", ErrorKind::kNone}, {"int8", ErrorKind::kInt8}, {"f32", ErrorKind::kF32}};
  const ErrorKind kind = kinds.at(text("error"));
  ErrorMemory before(map, kind);
  ErrorMemory after(map, kind);
  ErrorMemory next(map, kind);
  if (kind != ErrorKind::kNone) {
    fill_error(before, fields.at("before"));
    fill_error(after, fields.at("after"));
  }
  std::optional<Dither> dither;
  if (fields.contains("dither")) {
    dither = {std::stoull(text("dither")),
              static_cast<std::uint32_t>(std::stoul(text("dither", 1))),
              static_cast<std::uint32_t>(std::stoul(text("dither", 2)))};
  }
  const auto count = static_cast<std::size_t>(map.element_count());
  Guarded<float> values(count);
  Guarded<float> decoded(count);
  Guarded<float> back(count);
  Guarded<std::byte> message(static_cast<std::size_t>(offset));
  Guarded<std::byte> sent(message.size());
  fill(values, text("values"));
  fill(decoded, text("decoded"));
  fill(message, text("message"));
  std::atomic<std::uint32_t> nonfinite = 0;
  quantize_kernel({.tiles = map.tiles(),
                   .group_size = format.group_size,
                   .values = values.data(),
                   .factor = from_hex<float>(text("factor"))[0],
                   .before = before.state(),
                   .after = next.state(),
                   .beta = from_hex<float>(text("beta"))[0],
                   .dither = dither ? &*dither : nullptr,
                   .out = {format, sent.data(), 0, layout.rows().data()},
                   .nonfinite = &nonfinite});
  EXPECT_EQ(difference(sent, message, "byte"), "");
  EXPECT_EQ(error_difference(next, after), "");
  std::atomic<std::uint32_t> nan_seen = 0;
  dequantize_kernel({.tiles = map.tiles(),
                     .group_size = format.group_size,
                     .in = {{format, message.data(), 0, layout.rows().data()}, 0, 1},
                     .values = back.data(),
                     .nonfinite = &nan_seen});
  EXPECT_EQ(difference(back, decoded, "decoded element"), "");
  const bool has_nan = std::any_of(decoded.data(), decoded.data() + count,
                                   [](float value) { return std::isnan(value); });
  EXPECT_EQ(nonfinite, has_nan ? 1U : 0U);
  EXPECT_EQ(nan_seen, has_nan ? 1U : 0U);
}

using GoldenOn = kernels::OnTarget;

TEST_P(GoldenOn, IsWhatTheDefinitionAndTheKernelsGive) {
  const std::vector<Fields> cases = golden_cases();
  ASSERT_EQ(cases.size(), 20U);
  for (const Fields& fields : cases) {
    check(fields, quantize_reference, dequantize_reference);
    check(fields, quantize, dequantize);
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
