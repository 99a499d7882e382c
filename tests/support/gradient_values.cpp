#include "tests/support/gradient_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hsdp::test {
namespace {

template <typename T>
T loaded(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

void encode_one(float value, Dtype dtype, std::byte* to) {
  switch (dtype) {
    case Dtype::kBf16:
      return store(to, to_bf16(value).bits);
    case Dtype::kF16:
      return store(to, to_f16(value).bits);
    case Dtype::kF64:
      return store(to, static_cast<double>(value));
    default:
      return store(to, value);
  }
}

float decode_one(const std::byte* from, Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return to_float(Bf16{loaded<std::uint16_t>(from)});
    case Dtype::kF16:
      return to_float(F16{loaded<std::uint16_t>(from)});
    case Dtype::kF64:
      return static_cast<float>(loaded<double>(from));
    default:
      return loaded<float>(from);
  }
}

Shape strides_of(const Shape& shape, const std::vector<int>& axis_order) {
  Shape strides(shape.size(), 1);
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    const std::size_t axis = axis_order.empty() ? i : static_cast<std::size_t>(axis_order[i]);
    strides[axis] = stride;
    stride *= shape[axis];
  }
  return strides;
}

}  // namespace

std::uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15U;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

int Random::integer(int low, int high) {
  return low + static_cast<int>(next() % static_cast<std::uint64_t>(high - low + 1));
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

Values integer_values(std::int64_t count, int low, int high, std::uint64_t seed) {
  Random random(seed);
  Values values(static_cast<std::size_t>(count));
  for (float& value : values) value = static_cast<float>(random.integer(low, high));
  return values;
}

Values random_values(std::int64_t count, Dtype dtype, std::uint64_t seed, ExponentRange exponents) {
  Random random(seed);
  Values values(static_cast<std::size_t>(count));
  for (float& value : values) {
    const double sign = random.integer(0, 1) == 0 ? 1.0 : -1.0;
    const double magnitude =
        std::ldexp(1.0 + random.uniform(), random.integer(exponents.low, exponents.high));
    const bool zero = random.integer(0, 7) == 0;
    value = round_to(dtype, static_cast<float>(sign * (zero ? 0.0 : magnitude)));
  }
  return values;
}

StoredGradient::StoredGradient(const Values& values, const Shape& shape, Dtype dtype,
                               const std::vector<int>& axis_order)
    : memory_(values.size() * size_bytes(dtype)),
      shape_(shape),
      strides_(strides_of(shape, axis_order)),
      dtype_(dtype) {
  Shape index(shape.size(), 0);
  for (const float value : values) {
    std::int64_t at = 0;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) at += index[axis] * strides_[axis];
    encode_one(value, dtype, memory_.data() + static_cast<std::size_t>(at) * size_bytes(dtype));
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      if (++index[axis] < shape[axis]) break;
      index[axis] = 0;
    }
  }
}

StridedView StoredGradient::view() const {
  return {.data = memory_.data(), .dtype = dtype_, .shape = shape_, .strides = strides_};
}

void StoredGradient::poison() { std::fill(memory_.begin(), memory_.end(), std::byte{0xff}); }

std::vector<std::byte> encoded(const Values& values, Dtype dtype) {
  std::vector<std::byte> memory(values.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    encode_one(values[i], dtype, memory.data() + i * size_bytes(dtype));
  }
  return memory;
}

Values decoded(const std::vector<std::byte>& memory, Dtype dtype) {
  Values values(memory.size() / size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = decode_one(memory.data() + i * size_bytes(dtype), dtype);
  }
  return values;
}

}  // namespace hsdp::test
