// What the checks of the NCCL engine put in and expect, the same on every rank.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/dtype.h"

namespace hsdp::gpu {

// Any magnitude and sign.
inline float noise(int rank, std::int64_t i) {
  std::uint64_t x = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15U +
                    static_cast<std::uint64_t>(rank + 1) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  x ^= x >> 31U;
  return std::ldexp(static_cast<float>(x % 20001) / 10000.0F - 1.0F,
                    static_cast<int>((x >> 40U) % 24) - 12);
}

// Their sums over a few ranks are exact in every dtype.
inline float small_integer(int rank, std::int64_t i) {
  return static_cast<float>((i * 7 + rank * 3) % 13);
}

inline float rounded(Dtype dtype, float value) {
  if (dtype == Dtype::kBf16) return to_float(to_bf16(value));
  if (dtype == Dtype::kF16) return to_float(to_f16(value));
  return value;
}

inline std::vector<std::byte> encoded(const std::vector<float>& values, Dtype dtype) {
  std::vector<std::byte> bytes(values.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto store = [&](auto value) {
      std::memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value));
    };
    if (dtype == Dtype::kBf16) {
      store(to_bf16(values[i]));
    } else if (dtype == Dtype::kF16) {
      store(to_f16(values[i]));
    } else {
      store(values[i]);
    }
  }
  return bytes;
}

// Values in memory of the GPU.
class DeviceValues {
 public:
  DeviceValues(Device device, const std::vector<float>& values, Dtype dtype)
      : count_(static_cast<std::int64_t>(values.size())),
        dtype_(dtype),
        buffer_(device, values.size() * size_bytes(dtype)) {
    const std::vector<std::byte> bytes = encoded(values, dtype);
    Stream stream = Stream::create(device, "fill");
    copy_bytes(buffer_.data(), bytes.data(), bytes.size(), stream);
    stream.synchronize();
  }
  [[nodiscard]] TensorView view() const {
    return {buffer_.data(), count_, dtype_, buffer_.device()};
  }

 private:
  std::int64_t count_;
  Dtype dtype_;
  Buffer buffer_;
};

[[nodiscard]] inline std::vector<float> floats_of(TensorView view, Stream& stream) {
  std::vector<float> values(static_cast<std::size_t>(view.count));
  copy_bytes(values.data(), view.data, view.size_in_bytes(), stream);
  stream.synchronize();
  return values;
}

// Empty, or the first element whose bits differ.
[[nodiscard]] inline std::string difference(const std::vector<float>& got,
                                            const std::vector<float>& want,
                                            const std::string& what) {
  if (got.size() != want.size()) return what + ": another number of elements";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(float)) == 0) continue;
    return what + ": element " + std::to_string(i) + ": expected " + std::to_string(want[i]) +
           ", got " + std::to_string(got[i]);
  }
  return {};
}

}  // namespace hsdp::gpu
