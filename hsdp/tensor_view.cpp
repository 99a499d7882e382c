#include "hsdp/tensor_view.h"

namespace hsdp {

std::string to_string(Device device) {
  return (device.type == DeviceType::kHost ? "cpu" : "cuda") +
         (device.type == DeviceType::kHost ? std::string() : ":" + std::to_string(device.index));
}

std::string to_string(const ConstTensorView& view) {
  return std::to_string(view.count) + " " + std::string(name(view.dtype)) + " on " +
         to_string(view.device);
}

std::int64_t element_count(const Shape& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::string to_string(const Shape& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::int64_t StridedView::count() const { return element_count(shape); }

bool StridedView::is_contiguous() const {
  if (strides.empty()) return true;
  std::int64_t expected = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return count() == 0;
    expected *= shape[i];
  }
  return true;
}

}  // namespace hsdp
