#include "quant/hop_state.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "quant/group_arithmetic.h"

namespace hsdp::quant {
namespace {

constexpr std::int64_t kMostOffset = std::int64_t{1} << 60;
constexpr std::int64_t kMostReplicas = 1 << 16;
constexpr std::string_view kGatherPart = "gather";

[[noreturn]] void refuse(const std::string& expected, const std::string& got,
                         const std::string& remedy = "load what LocoHop has saved, as it was") {
  throw UsageError(
      {.where = "loco: load_state", .expected = expected, .got = got, .remedy = remedy});
}

// "r12" with 'r' gives 12; nothing for any other text.
std::optional<std::int64_t> number_after(char letter, std::string_view text) {
  if (text.size() < 2 || text.front() != letter) return std::nullopt;
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + 1, end, value);
  if (error != std::errc{} || stop != end || value < 0 || value > kMostOffset) return std::nullopt;
  return value;
}

std::string_view take_last(std::string_view& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return {};
  const std::string_view last = path.substr(slash + 1);
  path = path.substr(0, slash);
  return last;
}

template <typename Value>
std::vector<Value> on_host(const TensorView& data) {
  std::vector<Value> values(static_cast<std::size_t>(data.count));
  if (data.count == 0) return values;
  Stream stream = Stream::create(data.device, "hsdp-loco");
  stream.run([&, inside = stream.inside_task()] {
    copy_bytes(values.data(), data.data, data.size_in_bytes(), inside);
  });
  stream.synchronize();
  return values;
}

template <typename Value>
Value one_number(const HopState& one, Dtype dtype) {
  if (one.data.dtype != dtype || one.data.count != 1) {
    refuse("'" + one.key + "' to be one " + std::string(name(dtype)),
           std::to_string(one.data.count) + " of " + std::string(name(one.data.dtype)));
  }
  return on_host<Value>(one.data).front();
}

SavedHeader header_of(std::span<const HopState> state) {
  SavedHeader header;
  const auto find = [&](const char* key) -> const HopState& {
    const auto found = std::ranges::find(state, key, &HopState::key);
    if (found == state.end()) refuse(std::string("'") + key + "' in it", "a state without");
    return *found;
  };
  const auto read = [&](const char* key, std::int64_t least, std::int64_t most) {
    const auto value = one_number<std::int64_t>(find(key), Dtype::kI64);
    if (value < least || value > most) {
      refuse(std::string("'") + key + "' from " + std::to_string(least) + " to " +
                 std::to_string(most),
             std::to_string(value));
    }
    return value;
  };
  header.steps = read("steps", 0, kMostOffset);
  header.replicas = read("replicas", 1, kMostReplicas);
  header.group_size = read("group_size", kLeastGroupSize, kMostGroupSize);
  require_valid(GroupFormat{.group_size = static_cast<int>(header.group_size)});
  header.err_beta = one_number<double>(find("err_beta"), Dtype::kF64);
  if (!(header.err_beta >= 0.0 && header.err_beta < 1.0)) {
    refuse("'err_beta' from 0 to below 1", std::to_string(header.err_beta));
  }
  return header;
}

void require_dtype(const HopState& one, Dtype dtype) {
  if (one.data.dtype == dtype) return;
  refuse("'" + one.key + "' in " + std::string(name(dtype)), std::string(name(one.data.dtype)));
}

void require_finite(const std::string& key, std::span<const float> values) {
  const auto found = std::ranges::find_if(values, [](float v) { return !std::isfinite(v); });
  if (found == values.end()) return;
  refuse("finite numbers in '" + key + "'", std::to_string(*found));
}

// Quantizes a group of errors to int8; returns its scale.
float encode(std::span<const float> values, std::int8_t* codes) {
  std::uint32_t top = 0;
  for (const float value : values) top = std::max(top, magnitude_bits(value));
  const GroupScaling scaling = scaling_of(top, scaling_rule(Code::kInt8, Dtype::kF32));
  for (const float value : values) *codes++ = static_cast<std::int8_t>(code_of(value, scaling));
  return scaling.scale;
}

std::int64_t group_end_after(std::int64_t element, std::int64_t group_size) {
  return (element / group_size + 1) * group_size;
}

}  // namespace

std::int64_t groups_between(std::int64_t begin, std::int64_t end, std::int64_t group_size) {
  return padded(end, group_size) / group_size - begin / group_size;
}

void append(SavedHeader& header, std::vector<HopState>& to) {
  to.push_back({"steps", {&header.steps, 1, Dtype::kI64, {}}});
  to.push_back({"replicas", {&header.replicas, 1, Dtype::kI64, {}}});
  to.push_back({"group_size", {&header.group_size, 1, Dtype::kI64, {}}});
  to.push_back({"err_beta", {&header.err_beta, 1, Dtype::kF64, {}}});
}

std::string error_key(const ErrorPlace& place, std::string_view kind) {
  const std::string half = place.replica == ErrorPlace::kGathered
                               ? std::string(kGatherPart)
                               : "r" + std::to_string(place.replica);
  return place.parameter + "/" + half + "/o" + std::to_string(place.flat_offset) + "/" +
         std::string(kind);
}

std::optional<ErrorKey> parse_error_key(const std::string& key) {
  if (key.find('/') == std::string::npos) return std::nullopt;
  std::string_view left = key;
  const std::string_view kind = take_last(left);
  const std::optional<std::int64_t> offset = number_after('o', take_last(left));
  const std::string_view half = take_last(left);
  const std::optional<std::int64_t> replica =
      half == kGatherPart ? ErrorPlace::kGathered : number_after('r', half);
  if (!offset || !replica || *replica >= kMostReplicas ||
      (kind != "codes" && kind != "scales" && kind != "values")) {
    refuse("keys like 'name/r0/o0/codes' or 'name/gather/o0/values'", "'" + key + "'");
  }
  return ErrorKey{{std::string(left), static_cast<int>(*replica), *offset, 0}, std::string(kind)};
}

bool takes_over(std::int64_t before, std::int64_t replicas_before, std::int64_t now,
                std::int64_t replicas) {
  return std::max(before * replicas, now * replicas_before) <
         std::min((before + 1) * replicas, (now + 1) * replicas_before);
}

SavedState::SavedState(std::span<const HopState> state) : header_(header_of(state)) {
  for (const HopState& one : state) {
    const std::optional<ErrorKey> key = parse_error_key(one.key);
    if (!key) continue;
    if (key->place.replica >= header_.replicas) {
      refuse("errors of " + std::to_string(header_.replicas) + " replicas", "'" + one.key + "'");
    }
    SavedErrors& errors = rows_[{key->place.parameter, key->place.replica}][key->place.flat_offset];
    errors.place = key->place;
    if (key->kind == "codes") {
      require_dtype(one, Dtype::kU8);
      errors.codes = on_host<std::int8_t>(one.data);
    } else {
      require_dtype(one, Dtype::kF32);
      std::vector<float>& numbers = key->kind == "scales" ? errors.scales : errors.values;
      numbers = on_host<float>(one.data);
      require_finite(one.key, numbers);
    }
  }
  for (auto& [name, row] : rows_) {
    std::int64_t end = 0;
    for (auto& [offset, errors] : row) {
      if (!errors.codes.empty() && !errors.values.empty()) {
        refuse("either codes or values", "both at '" + error_key(errors.place, "values") + "'");
      }
      errors.place.count = std::ssize(errors.codes) + std::ssize(errors.values);
      const std::int64_t groups =
          errors.codes.empty()
              ? 0
              : groups_between(offset, offset + errors.place.count, header_.group_size);
      if (std::ssize(errors.scales) != groups) {
        refuse(std::to_string(groups) + " of '" + error_key(errors.place, "scales") +
                   "' beside its " + std::to_string(errors.place.count) + " codes",
               std::to_string(errors.scales.size()));
      }
      if (errors.place.count == 0 || offset < end) {
        refuse("errors of each element once", "'" + error_key(errors.place, "...") + "' with " +
                                                  std::to_string(errors.place.count) +
                                                  " elements, and others up to element " +
                                                  std::to_string(end));
      }
      end = offset + errors.place.count;
    }
  }
}

const SavedState::Row* SavedState::row_of(const std::string& parameter, int replica) const {
  const auto found = rows_.find({parameter, replica});
  return found == rows_.end() ? nullptr : &found->second;
}

SavedState::Found SavedState::find(const Row& row, std::int64_t element) const {
  auto after = row.upper_bound(element);
  if (after == row.begin()) return {};
  const SavedErrors& errors = std::prev(after)->second;
  const std::int64_t end = errors.place.flat_offset + errors.place.count;
  if (element >= end) return {};
  if (!errors.values.empty()) return {&errors, errors.place.flat_offset, end};
  const std::int64_t size = header_.group_size;
  return {&errors, std::max(errors.place.flat_offset, element / size * size),
          std::min(end, group_end_after(element, size))};
}

std::int64_t SavedState::add_decoded(const Source& source, std::int64_t begin, float factor,
                                     bool is_first, std::span<float> to) const {
  if (is_first) std::ranges::fill(to, 0.0F);
  if (source.row == nullptr) return std::ssize(to);
  std::int64_t missing = 0;
  for (std::int64_t i = 0; i < std::ssize(to);) {
    const Found found = find(*source.row, begin + i);
    if (found.errors == nullptr) {
      ++missing;
      ++i;
      continue;
    }
    const SavedErrors& errors = *found.errors;
    const std::int64_t first = errors.place.flat_offset;
    const std::int64_t end = std::min<std::int64_t>(std::ssize(to), found.group_end - begin);
    float scale = 0.0F;
    if (errors.values.empty()) {
      const std::int64_t group = (begin + i) / header_.group_size - first / header_.group_size;
      scale = errors.scales[static_cast<std::size_t>(group)] * factor;
    }
    for (; i < end; ++i) {
      const auto at = static_cast<std::size_t>(begin + i - first);
      float value =
          errors.values.empty() ? decoded(errors.codes[at], scale) : errors.values[at] * factor;
      if (source.weight) value *= *source.weight;
      float& sum = to[static_cast<std::size_t>(i)];
      sum = is_first ? value : sum + value;
    }
  }
  return missing;
}

std::vector<SavedState::Source> SavedState::sources_of(const ErrorPlace& place,
                                                       std::int64_t replicas) const {
  const std::int64_t before = header_.replicas;
  if (place.replica == ErrorPlace::kGathered || before == replicas) {
    return {{row_of(place.parameter, place.replica), {}}};
  }
  std::vector<Source> sources;
  for (int r = 0; r < before; ++r) {
    if (!takes_over(r, before, place.replica, replicas)) continue;
    const std::int64_t covered = std::min((r + 1) * replicas, (place.replica + 1) * before) -
                                 std::max(r * replicas, place.replica * before);
    sources.push_back({row_of(place.parameter, r), static_cast<float>(covered)});
  }
  return sources;
}

SavedErrors SavedState::errors_of(const ErrorPlace& place, const Wanted& wanted,
                                  std::int64_t* missing) const {
  const float factor = header_.err_beta == wanted.err_beta
                           ? 1.0F
                           : static_cast<float>((1.0 - wanted.err_beta) / (1.0 - header_.err_beta));
  const std::vector<Source> sources = sources_of(place, wanted.replicas);
  const bool is_one = !sources.front().weight;
  SavedErrors result{.place = place};
  const auto count = static_cast<std::size_t>(place.count);
  result.codes.resize(wanted.as_values ? 0 : count);
  result.values.resize(wanted.as_values ? count : 0);
  std::vector<float> values;
  const std::int64_t end = place.flat_offset + place.count;
  for (std::int64_t begin = place.flat_offset; begin < end;) {
    const std::int64_t group_end = std::min(end, group_end_after(begin, wanted.group_size));
    const auto at = static_cast<std::size_t>(begin - place.flat_offset);
    const auto size = static_cast<std::size_t>(group_end - begin);
    const bool may_copy = is_one && sources.front().row != nullptr && !wanted.as_values;
    const Found same = may_copy ? find(*sources.front().row, begin) : Found{};
    if (same.errors != nullptr && same.errors->values.empty() && same.group_begin == begin &&
        same.group_end == group_end) {
      const std::int64_t first = same.errors->place.flat_offset;
      std::copy_n(same.errors->codes.begin() + (begin - first), size, result.codes.data() + at);
      const std::int64_t group = begin / header_.group_size - first / header_.group_size;
      result.scales.push_back(same.errors->scales[static_cast<std::size_t>(group)] * factor);
    } else {
      values.resize(size);
      bool is_first = true;
      for (const Source& source : sources) {
        *missing += add_decoded(source, begin, factor, is_first, values);
        is_first = false;
      }
      for (float& value : values) {
        if (!is_one) value /= static_cast<float>(wanted.replicas);
      }
      if (wanted.as_values) {
        std::ranges::copy(values, result.values.data() + at);
      } else {
        result.scales.push_back(encode(values, result.codes.data() + at));
      }
    }
    begin = group_end;
  }
  require_finite(error_key(place, wanted.as_values ? "values" : "scales"),
                 wanted.as_values ? result.values : result.scales);
  return result;
}

void SavedState::scale(float factor) {
  for (auto& [name, row] : rows_) {
    for (auto& [offset, errors] : row) {
      for (float& scale : errors.scales) scale *= factor;
      for (float& value : errors.values) value *= factor;
    }
  }
}

void SavedState::require_parts_of(const std::map<std::string, std::int64_t>& parameters) const {
  for (const auto& [name, row] : rows_) {
    const auto found = parameters.find(name.first);
    const std::string what = "errors of '" + name.first + "'";
    if (found == parameters.end()) {
      refuse("errors of this model's parameters", what + ", which it has not",
             "load what this model has saved, or with strict=False");
    }
    const ErrorPlace& last = std::prev(row.end())->second.place;
    if (last.flat_offset + last.count > found->second) {
      refuse(what + ", which has " + std::to_string(found->second) + " elements",
             "some of element " + std::to_string(last.flat_offset + last.count - 1),
             "load what this model has saved, or with strict=False");
    }
  }
}

void SavedState::append_to(std::vector<HopState>& state) {
  append(header_, state);
  const auto add = [&state](const ErrorPlace& place, std::string_view kind, auto& numbers,
                            Dtype dtype) {
    if (numbers.empty()) return;
    state.push_back({error_key(place, kind), {numbers.data(), std::ssize(numbers), dtype, {}}});
  };
  for (auto& [name, row] : rows_) {
    for (auto& [offset, errors] : row) {
      add(errors.place, "codes", errors.codes, Dtype::kU8);
      add(errors.place, "scales", errors.scales, Dtype::kF32);
      add(errors.place, "values", errors.values, Dtype::kF32);
    }
  }
}

}  // namespace hsdp::quant
