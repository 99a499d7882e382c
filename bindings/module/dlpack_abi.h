// The memory layout of DLPack, version 1: what array libraries pass each other in a capsule, and
// the functions that an array's class provides.
//
// Layouts, and their conversion to and from the library's dtypes and devices; the names are ours.
#pragma once

#include <cstdint>

#include "hsdp/dtype.h"
#include "hsdp/tensor_view.h"

namespace hsdp::python::dlpack {

enum class DeviceKind : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum class TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6
};

struct DeviceId {
  DeviceKind kind;
  std::int32_t index;
  friend bool operator==(const DeviceId&, const DeviceId&) = default;
};

struct ElementType {
  TypeCode code;
  std::uint8_t bits;
  std::uint16_t lanes;
  friend bool operator==(const ElementType&, const ElementType&) = default;
};

struct Tensor {
  void* data;
  DeviceId device;
  std::int32_t dimension_count;
  ElementType type;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct VersionedTensor {
  Version version;
  void* context;
  void (*deleter)(VersionedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};

// Returns the calling thread's current stream.
using CurrentStream = int (*)(DeviceKind kind, std::int32_t index, void** out);

// Functions for arrays of exactly the class that provides them. They need the GIL. They return 0,
// or another number with a Python error set.
struct ExchangeApi {
  Version version;
  const ExchangeApi* older;
  void (*unused[3])();
  // The array keeps what `out` points to alive. Null: the class does not provide it.
  int (*describe)(void* array, Tensor* out);
  CurrentStream current_stream;
};

constexpr std::uint64_t kReadOnlyFlag = 1;
constexpr Version kVersion{1, 0};
constexpr const char* kName = "dltensor";
constexpr const char* kVersionedName = "dltensor_versioned";
constexpr const char* kExchangeApiName = "dlpack_exchange_api";
constexpr const char* kExchangeApiAttribute = "__dlpack_c_exchange_api__";

inline ElementType element_type(Dtype dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * size_bytes(dtype));
  switch (dtype) {
    case Dtype::kBf16:
      return {TypeCode::kBfloat, bits, 1};
    case Dtype::kI64:
      return {TypeCode::kInt, bits, 1};
    case Dtype::kU8:
      return {TypeCode::kUInt, bits, 1};
    default:
      return {TypeCode::kFloat, bits, 1};
  }
}

inline DeviceId device_id(Device device) {
  const bool on_host = device.type == DeviceType::kHost;
  return {on_host ? DeviceKind::kCpu : DeviceKind::kCuda, device.index};
}

}  // namespace hsdp::python::dlpack
