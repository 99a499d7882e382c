#include "quant/loco_options.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdio>

#include "hsdp/error.h"

namespace hsdp::quant {
namespace {

constexpr std::size_t kMostDescription = 127;

void require(bool holds, const char* option, const std::string& expected, const std::string& got) {
  if (holds) return;
  throw UsageError(
      {.where = std::string("loco: ") + option, .expected = expected, .got = got, .remedy = ""});
}

// FNV-1a: identifies a long text in a few bytes.
std::string digest(std::string_view text_of) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text_of) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(hash ^ hash >> 32));
  return text;
}

// "3 patterns, 7bd5de72"
std::string text_of(const std::vector<std::string>& patterns) {
  std::string all;
  for (const std::string& pattern : patterns) all += pattern + '\n';
  return std::to_string(patterns.size()) + (patterns.size() == 1 ? " pattern " : " patterns ") +
         digest(all);
}

}  // namespace

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

void require_valid(const LocoOptions& options) {
  require(options.bits == 4 || options.bits == 8, "bits", "4 or 8", std::to_string(options.bits));
  require_valid(GroupFormat{.group_size = options.group_size, .scale_dtype = options.scale_dtype});
  require(options.err_beta >= 0.0 && options.err_beta < 1.0, "err_beta",
          "a number from 0 to below 1", number_text(options.err_beta));
  require(options.reset_T >= 0, "reset_T", "steps, or 0 for never",
          std::to_string(options.reset_T));
  require(options.error_dtype == Dtype::kU8 || options.error_dtype == Dtype::kF32, "error_dtype",
          "int8 or f32", std::string(hsdp::name(options.error_dtype)));
  require(!options.plain_dtype || sums_in_f32(*options.plain_dtype), "plain_dtype",
          "f32, bf16 or f16",
          options.plain_dtype ? std::string(hsdp::name(*options.plain_dtype)) : "");
  require(options.warmup_steps >= 0, "warmup_steps", "steps, 0 or more",
          std::to_string(options.warmup_steps));
  require(!options.stochastic_error || options.error_dtype == Dtype::kU8, "stochastic_error",
          "errors in int8", "f32, which has nothing to round");
  require(options.error_every >= 0, "error_every", "steps, or 0 for never",
          std::to_string(options.error_every));
}

std::string describe(const LocoOptions& options) {
  std::string text = "loco " + std::to_string(options.bits) + " bit, groups of " +
                     std::to_string(options.group_size) + " " +
                     std::string(hsdp::name(options.scale_dtype));
  const Code code = options.bits == 4 ? Code::kInt4 : Code::kInt8;
  if (options.gather.value_or(code) != code)
    text += ", gather " + std::string(name(*options.gather));
  if (options.error_feedback) {
    text += ", beta " + number_text(options.err_beta) + ", T " + std::to_string(options.reset_T);
    if (options.error_dtype == Dtype::kF32) text += ", f32";
    if (options.stochastic_error) text += ", seed " + std::to_string(options.seed);
  } else {
    text += ", no error";
  }
  if (options.warmup_steps > 0) text += ", warm-up " + std::to_string(options.warmup_steps);
  if (!options.exclude.empty()) text += ", exclude " + text_of(options.exclude);
  if (options.plain_dtype) text += ", plain " + std::string(hsdp::name(*options.plain_dtype));
  if (text.size() <= kMostDescription) return text;
  const std::string rest = "... " + digest(text);
  return text.substr(0, kMostDescription - rest.size()) + rest;
}

bool is_excluded(const LocoOptions& options, const std::string& name) {
  return std::ranges::any_of(options.exclude, [&name](const std::string& pattern) {
    return pattern == name || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  });
}

}  // namespace hsdp::quant
