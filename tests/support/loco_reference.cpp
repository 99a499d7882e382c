#include "tests/support/loco_reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "quant/dither.h"

namespace hsdp::test {
namespace {

using quant::Code;
using Floats = LocoReference::Floats;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// [begin, end) of the groups of a parameter.
std::vector<std::pair<std::int64_t, std::int64_t>> groups_of(
    const LocoReference::Parameter& parameter, int size) {
  std::vector<std::pair<std::int64_t, std::int64_t>> groups;
  const std::int64_t count = parameter.cuts.back();
  for (std::int64_t i = 0; i < count; ++i) {
    const bool cut = i % size == 0 || std::ranges::binary_search(parameter.cuts, i);
    if (cut) groups.emplace_back(i, i);
    groups.back().second = i + 1;
  }
  return groups;
}

// Codes of one group, and their scale.
struct Coded {
  std::vector<int> codes;
  float scale = 0.0F;
};

Coded coded(const Floats& values, int levels, bool bf16_scale, const Floats& dither = {}) {
  Coded result{std::vector<int>(values.size()), 0.0F};
  float top = 0.0F;
  for (const float value : values) {
    if (!std::isfinite(value)) {
      result.scale = kNan;
      return result;
    }
    top = std::max(top, std::abs(value));
  }
  const auto most_levels = static_cast<float>(levels);
  float most = std::numeric_limits<float>::max() / most_levels;
  if (!std::isfinite(most * most_levels)) most = std::nextafter(most, 0.0F);
  const float lift = top < std::ldexp(1.0F, -64) ? std::ldexp(1.0F, 64) : 1.0F;
  result.scale = std::min(top / most_levels, most);
  float inverse = 0.0F;
  if (bf16_scale) {
    const float most_bf16 = std::bit_cast<float>(bits_of(most) & 0xffff0000U);
    const std::uint32_t bits = bits_of(result.scale);
    const std::uint32_t up = (bits & 0xffffU) == 0 ? bits : (bits & 0xffff0000U) + 0x10000U;
    result.scale = std::min(std::bit_cast<float>(up), most_bf16);
    if (result.scale != 0.0F) inverse = 1.0F / (result.scale * lift);
  } else if (top != 0.0F) {
    inverse = most_levels / (top * lift);
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float lifted = values[i] * lift;
    float scaled = lifted * inverse;
    if (!dither.empty()) scaled = scaled + dither[i];
    result.codes[i] = static_cast<int>(std::nearbyint(scaled));
  }
  return result;
}

float decoded(const Coded& coded, std::size_t i) {
  return static_cast<float>(coded.codes[i]) * coded.scale;
}

float rounded_to_bf16(float value) { return to_float(to_bf16(value)); }

}  // namespace

LocoReference::LocoReference(const quant::LocoOptions& options, int replicas,
                             std::vector<Parameter> parameters)
    : options_(options),
      replicas_(replicas),
      parameters_(std::move(parameters)),
      errors_(static_cast<std::size_t>(replicas) + 1) {
  for (std::vector<Errors>& errors : errors_) {
    for (const Parameter& parameter : parameters_) {
      const auto count = static_cast<std::size_t>(parameter.cuts.back());
      errors.push_back({Floats(count), Floats(count, 1.0F)});
    }
  }
}

bool LocoReference::is_plain(std::size_t parameter) const {
  return steps_ < options_.warmup_steps || is_excluded(options_, parameters_[parameter].name);
}

std::vector<double> LocoReference::owed(std::size_t parameter) const {
  std::vector<double> owed(static_cast<std::size_t>(parameters_[parameter].cuts.back()));
  for (const std::vector<Errors>& all : errors_) {
    const Errors& errors = all[parameter];
    for (std::size_t i = 0; i < owed.size(); ++i) {
      owed[i] +=
          errors.codes[i] * static_cast<double>(errors.scales[i]) / (1.0 - options_.err_beta);
    }
  }
  return owed;
}

LocoReference::Half LocoReference::quantized(const Floats& given, const Errors& errors,
                                             const Parameter& parameter, Code code,
                                             std::uint32_t stream) const {
  Half half{Floats(given.size()), errors};
  Floats error(given.size());
  for (std::size_t i = 0; i < error.size(); ++i) error[i] = errors.codes[i] * errors.scales[i];
  const bool feeds_back = options_.error_feedback;
  const auto keep = static_cast<float>(options_.err_beta);
  const float take = 1.0F - keep;
  for (const auto& [begin, end] : groups_of(parameter, options_.group_size)) {
    Floats h;
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      h.push_back(feeds_back ? given[i] + error[i] : given[i]);
    }
    const Coded group =
        coded(h, code == Code::kInt4 ? 7 : 127, options_.scale_dtype == Dtype::kBf16);
    Floats next(h.size());
    Floats dither;
    for (std::size_t k = 0; k < h.size(); ++k) {
      const auto i = static_cast<std::size_t>(begin) + k;
      half.sent[i] = decoded(group, k);
      const float kept = keep * error[i];
      const float missed = h[k] - half.sent[i];
      const float taken = take * missed;
      next[k] = kept + taken;
      if (options_.stochastic_error) {
        const quant::Dither place{options_.seed, static_cast<std::uint32_t>(steps_),
                                  stream | repeat_ << 16U};
        const quant::PhiloxWords words =
            quant::dither_words(place, parameter.number, static_cast<std::int64_t>(i));
        dither.push_back(quant::dither_of(words, static_cast<int>(i % quant::kDitherElements)));
      }
    }
    if (!feeds_back) continue;
    if (options_.error_dtype == Dtype::kF32) {
      std::ranges::copy(next, half.next.codes.begin() + begin);
      continue;
    }
    const Coded kept = coded(next, 127, false, dither);
    for (std::size_t k = 0; k < h.size(); ++k) {
      const auto i = static_cast<std::size_t>(begin) + k;
      half.next.codes[i] = static_cast<float>(kept.codes[k]);
      half.next.scales[i] = kept.scale;
    }
  }
  return half;
}

std::vector<Floats> LocoReference::reduce(const std::vector<std::vector<Floats>>& sums,
                                          float divisor) {
  if (next_.empty()) {
    next_ = errors_;
    if (options_.reset_T > 0 && steps_ > 0 && steps_ % options_.reset_T == 0) {
      for (std::vector<Errors>& errors : next_) {
        for (Errors& error : errors) std::ranges::fill(error.codes, 0.0F);
      }
    }
    sum_.assign(parameters_.size(), {});
  }
  const Code code = options_.bits == 4 ? Code::kInt4 : Code::kInt8;
  const Code gather = options_.gather.value_or(code);
  const float factor = 1.0F / divisor;
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    if (is_plain(p)) continue;
    Floats total;
    for (int r = 0; r < replicas_; ++r) {
      const auto replica = static_cast<std::size_t>(r);
      Floats given = sums[replica][p];
      for (float& value : given) value = value * factor;
      Half half = quantized(given, next_[replica][p], parameters_[p], code,
                            2U * static_cast<std::uint32_t>(r));
      next_[replica][p] = std::move(half.next);
      if (r == 0) total.assign(half.sent.size(), 0.0F);
      for (std::size_t i = 0; i < total.size(); ++i) {
        total[i] = r == 0 ? half.sent[i] : total[i] + half.sent[i];
      }
    }
    if (!gathers_) {
      // the sum unchanged
    } else if (gather == Code::kBf16) {
      for (float& value : total) value = rounded_to_bf16(value);
    } else {
      Half half = quantized(total, next_.back()[p], parameters_[p], gather, 1);
      next_.back()[p] = std::move(half.next);
      total = std::move(half.sent);
    }
    if (sum_[p].empty()) {
      sum_[p] = std::move(total);
    } else {
      for (std::size_t i = 0; i < total.size(); ++i) sum_[p][i] = sum_[p][i] + total[i];
    }
  }
  ++repeat_;
  return sum_;
}

void LocoReference::scale_errors(float factor) {
  for (std::vector<Errors>& all : errors_) {
    for (Errors& errors : all) {
      Floats& scaled = options_.error_dtype == Dtype::kF32 ? errors.codes : errors.scales;
      for (float& value : scaled) value = value * factor;
    }
  }
}

void LocoReference::set_gathers(bool gathers) {
  gathers_ = gathers;
  if (gathers_) return;
  for (Errors& errors : errors_.back()) std::ranges::fill(errors.codes, 0.0F);
}

void LocoReference::load(const LocoReference& from) {
  steps_ = from.steps_;
  const double owed = (1.0 - options_.err_beta) / (1.0 - from.options_.err_beta);
  const float factor =
      options_.err_beta == from.options_.err_beta ? 1.0F : static_cast<float>(owed);
  const bool had_values = from.options_.error_dtype == Dtype::kF32;
  const bool has_values = options_.error_dtype == Dtype::kF32;
  const int before = from.replicas_;
  for (int j = 0; j <= replicas_; ++j) {
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      Errors& to = errors_[static_cast<std::size_t>(j)][p];
      const auto old_errors = [&](int r) {
        Errors errors = from.errors_[static_cast<std::size_t>(r)][p];
        for (float& value : had_values ? errors.codes : errors.scales) value = value * factor;
        return errors;
      };
      const bool is_gathered = j == replicas_;
      const bool keeps = is_gathered || before == replicas_;
      Floats values;
      for (int r = 0; r <= before; ++r) {
        if (keeps && r != (is_gathered ? before : j)) continue;
        if (!keeps && r == before) continue;
        const int covered =
            std::min((r + 1) * replicas_, (j + 1) * before) - std::max(r * replicas_, j * before);
        if (!keeps && covered <= 0) continue;
        const Errors errors = old_errors(r);
        const bool is_first = values.empty();
        values.resize(errors.codes.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
          float value = errors.codes[i] * errors.scales[i];
          if (!keeps) value = value * static_cast<float>(covered);
          values[i] = is_first ? value : values[i] + value;
        }
      }
      if (!keeps) {
        for (float& value : values) value = value / static_cast<float>(replicas_);
      }
      if (has_values) {
        to = {values, Floats(values.size(), 1.0F)};
        continue;
      }
      const Errors same = old_errors(is_gathered ? before : std::min(j, before - 1));
      const auto old_groups = groups_of(from.parameters_[p], from.options_.group_size);
      for (const auto& [begin, end] : groups_of(parameters_[p], options_.group_size)) {
        if (keeps && !had_values && std::ranges::count(old_groups, std::pair{begin, end}) > 0) {
          std::copy(same.codes.begin() + begin, same.codes.begin() + end, to.codes.begin() + begin);
          std::copy(same.scales.begin() + begin, same.scales.begin() + end,
                    to.scales.begin() + begin);
          continue;
        }
        const Coded group = coded({values.begin() + begin, values.begin() + end}, 127, false);
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
          to.codes[i] = static_cast<float>(group.codes[i - static_cast<std::size_t>(begin)]);
          to.scales[i] = group.scale;
        }
      }
    }
  }
}

void LocoReference::end_step(bool clean) {
  if (clean) {
    if (!next_.empty()) errors_ = std::move(next_);
    ++steps_;
  }
  next_.clear();
  repeat_ = 0;
}

}  // namespace hsdp::test
