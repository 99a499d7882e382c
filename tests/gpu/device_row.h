// Elements on a device at any alignment, between guards, with a copy on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "hostile_value.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/stream.h"
#include "hsdp/kernels/arithmetic.h"

namespace hsdp::gpu {

// Bytes on a device between guards, with a copy of bytes and guards on the host. The bytes start
// `offset` bytes after an aligned address.
class GuardedBytes {
 public:
  GuardedBytes(std::size_t size, std::size_t offset, Stream stream)
      : begin_(kGuardBytes + offset),
        size_(size),
        stream_(std::move(stream)),
        bytes_(begin_ + size + kGuardBytes, kGuard),
        memory_(stream_.device(), bytes_.size()) {
    upload();
  }

  // Copies the host's bytes to the device.
  void upload() {
    copy_bytes(memory_.data(), bytes_.data(), bytes_.size(), stream_);
    stream_.synchronize();
  }
  // Copies them back. Returns what is wrong with the guards, or nothing.
  [[nodiscard]] std::string download() {
    copy_bytes(bytes_.data(), memory_.data(), bytes_.size(), stream_);
    stream_.synchronize();
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + size_) && bytes_[i] != kGuard) return "it wrote outside";
    }
    return {};
  }

  [[nodiscard]] std::byte* data() { return memory_.data() + begin_; }
  [[nodiscard]] std::byte* host() { return bytes_.data() + begin_; }
  [[nodiscard]] const std::byte* host() const { return bytes_.data() + begin_; }
  [[nodiscard]] Device device() const { return stream_.device(); }

 private:
  static constexpr std::size_t kGuardBytes = 64;
  static constexpr std::byte kGuard{0xa5};
  std::size_t begin_;
  std::size_t size_;
  Stream stream_;
  std::vector<std::byte> bytes_;
  Buffer memory_;
};

class DeviceRow {
 public:
  // The elements start `offset` elements after an aligned address.
  DeviceRow(Dtype dtype, std::int64_t count, std::size_t offset, const Stream& stream)
      : dtype_(dtype),
        count_(count),
        bytes_(static_cast<std::size_t>(count) * size_bytes(dtype), offset * size_bytes(dtype),
               stream) {}

  void fill(std::mt19937& random) {
    for (std::int64_t i = 0; i < count_; ++i) {
      kernels::encode(kernels::hostile_value(random), host(), i, dtype_);
    }
    upload();
  }
  void upload() { bytes_.upload(); }
  void copy_from(const DeviceRow& other) {
    std::memcpy(host(), other.host(), static_cast<std::size_t>(count_) * size_bytes(dtype_));
    upload();
  }

  [[nodiscard]] std::byte* data() { return bytes_.data(); }
  [[nodiscard]] std::byte* host() { return bytes_.host(); }
  [[nodiscard]] const std::byte* host() const { return bytes_.host(); }
  [[nodiscard]] float at(std::int64_t i) const { return kernels::decode(host(), i, dtype_); }
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] Dtype dtype() const { return dtype_; }
  [[nodiscard]] ConstTensorView view() { return {data(), count_, dtype_, bytes_.device()}; }
  [[nodiscard]] ConstTensorView host_view() const { return {host(), count_, dtype_}; }

  // Compares what the device wrote with the host's elements of `expected`, bit for bit except for
  // the payloads of NaNs, and checks the guards. Returns the first difference, or nothing.
  [[nodiscard]] std::string difference(const DeviceRow& expected) {
    if (const std::string found = bytes_.download(); !found.empty()) return found;
    const std::size_t width = size_bytes(dtype_);
    for (std::int64_t i = 0; i < count_; ++i) {
      const auto at_byte = static_cast<std::size_t>(i) * width;
      if (std::memcmp(host() + at_byte, expected.host() + at_byte, width) == 0) continue;
      const float a = at(i);
      const float b = expected.at(i);
      if (a != a && b != b) continue;
      return "element " + std::to_string(i) + " of " + std::to_string(count_) + ": expected " +
             std::to_string(b) + ", got " + std::to_string(a);
    }
    return {};
  }

 private:
  Dtype dtype_;
  std::int64_t count_;
  GuardedBytes bytes_;
};

constexpr Dtype kGradientDtypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};

}  // namespace hsdp::gpu
