// Non-owning views of memory. The caller keeps the memory alive while a view is in use; every
// function that takes a view says how long that is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "hsdp/dtype.h"

namespace hsdp {

enum class DeviceType : std::uint8_t { kHost, kCuda };

struct Device {
  DeviceType type = DeviceType::kHost;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

[[nodiscard]] std::string to_string(Device device);

// `count` contiguous elements, writable.
struct TensorView {
  void* data = nullptr;
  std::int64_t count = 0;
  Dtype dtype = Dtype::kF32;
  Device device{};

  [[nodiscard]] std::size_t size_in_bytes() const {
    return static_cast<std::size_t>(count) * size_bytes(dtype);
  }
  // Elements [begin, begin + length).
  [[nodiscard]] TensorView slice(std::int64_t begin, std::int64_t length) const {
    return {static_cast<std::byte*>(data) + static_cast<std::size_t>(begin) * size_bytes(dtype),
            length, dtype, device};
  }
};

// `count` contiguous elements, read-only.
struct ConstTensorView {
  const void* data = nullptr;
  std::int64_t count = 0;
  Dtype dtype = Dtype::kF32;
  Device device{};

  ConstTensorView() = default;
  ConstTensorView(const void* data_, std::int64_t count_, Dtype dtype_, Device device_ = {})
      : data(data_), count(count_), dtype(dtype_), device(device_) {}
  ConstTensorView(const TensorView& view)  // NOLINT(google-explicit-constructor): writable to
      : data(view.data), count(view.count), dtype(view.dtype), device(view.device) {}  // read-only

  [[nodiscard]] std::size_t size_in_bytes() const {
    return static_cast<std::size_t>(count) * size_bytes(dtype);
  }
  [[nodiscard]] ConstTensorView slice(std::int64_t begin, std::int64_t length) const {
    return {
        static_cast<const std::byte*>(data) + static_cast<std::size_t>(begin) * size_bytes(dtype),
        length, dtype, device};
  }
};

// For messages: "7 f32 on cuda:0".
[[nodiscard]] std::string to_string(const ConstTensorView& view);

using Shape = std::vector<std::int64_t>;

// A read-only gradient with any dense strides, as frameworks pass it. `strides` count elements;
// empty means row-major. Logical order is row-major over `shape`.
struct StridedView {
  const void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  Device device{};
  Shape shape{};
  Shape strides{};

  [[nodiscard]] std::int64_t count() const;
  [[nodiscard]] bool is_contiguous() const;
};

[[nodiscard]] std::int64_t element_count(const Shape& shape);
[[nodiscard]] std::string to_string(const Shape& shape);

}  // namespace hsdp
