// All memory of one kernel call, with a guard around every piece. For tests.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "quant/quantize.h"

namespace hsdp::quant {

// `count` elements that start an odd number of elements after an aligned address, between guards.
// Bytes of messages start at an even address, as they must.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count) : values_(count + 2 * kGuard) {
    std::memset(values_.data(), kFill, values_.size() * sizeof(T));
  }
  [[nodiscard]] T* data() { return values_.data() + kGuard; }
  [[nodiscard]] std::size_t size() const { return values_.size() - 2 * kGuard; }
  [[nodiscard]] T& operator[](std::size_t i) { return data()[i]; }
  [[nodiscard]] bool guards_hold() const {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(values_.data());
    for (std::size_t i = 0; i < kGuard * sizeof(T); ++i) {
      if (bytes[i] != kFill || bytes[values_.size() * sizeof(T) - 1 - i] != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = std::is_same_v<T, std::byte> ? 66 : 65;
  static constexpr unsigned char kFill = 0xa5;
  std::vector<T> values_;
};

enum class ErrorKind : std::uint8_t { kNone, kInt8, kF32 };

struct ErrorMemory {
  ErrorMemory(const GroupMap& map, ErrorKind kind_)
      : kind(kind_),
        codes(static_cast<std::size_t>(map.element_count())),
        scales(static_cast<std::size_t>(map.group_count())),
        values(static_cast<std::size_t>(map.element_count())) {}
  [[nodiscard]] ErrorState state() {
    if (kind == ErrorKind::kInt8) return {.codes = codes.data(), .scales = scales.data()};
    if (kind == ErrorKind::kF32) return {.values = values.data()};
    return {};
  }

  ErrorKind kind;
  Guarded<std::int8_t> codes;
  Guarded<float> scales;
  Guarded<float> values;
};

// Compares bit by bit, except the payloads of NaNs; empty when they are equal.
template <class T>
[[nodiscard]] std::string difference(Guarded<T>& a, Guarded<T>& b, const char* what) {
  if (!a.guards_hold() || !b.guards_hold()) return std::string(what) + ": written outside";
  for (std::size_t i = 0; i < a.size(); ++i) {
    if constexpr (std::is_same_v<T, float>) {
      if (std::bit_cast<std::uint32_t>(a[i]) == std::bit_cast<std::uint32_t>(b[i])) continue;
      if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    } else {
      if (a[i] == b[i]) continue;
    }
    return std::string(what) + " " + std::to_string(i) + " of " + std::to_string(a.size()) + ": " +
           std::to_string(static_cast<double>(a[i])) + " and " +
           std::to_string(static_cast<double>(b[i]));
  }
  return "";
}

[[nodiscard]] inline std::string error_difference(ErrorMemory& a, ErrorMemory& b) {
  return difference(a.codes, b.codes, "error code") +
         difference(a.scales, b.scales, "error scale") + difference(a.values, b.values, "error");
}

// The same of two messages.
[[nodiscard]] inline std::string message_difference(Guarded<std::byte>& a, Guarded<std::byte>& b,
                                                    const GroupFormat& format) {
  if (format.code == Code::kBf16) {  // elements, which may be NaN
    for (std::size_t i = 0; i + 2 <= a.size(); i += 2) {
      Bf16 left;
      Bf16 right;
      std::memcpy(&left, &a[i], sizeof(left));
      std::memcpy(&right, &b[i], sizeof(right));
      if (std::isnan(to_float(left)) && std::isnan(to_float(right))) {
        std::memcpy(&a[i], &right, sizeof(right));
      }
    }
  }
  return difference(a, b, "byte");
}

}  // namespace hsdp::quant
