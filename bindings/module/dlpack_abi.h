// The memory layout of DLPack, version 1: what array libraries hand each other in a capsule.
//
// Layouts only; the names are ours.
#pragma once

#include <cstdint>

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
};

struct ElementType {
  TypeCode code;
  std::uint8_t bits;
  std::uint16_t lanes;
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

constexpr std::uint64_t kReadOnlyFlag = 1;
constexpr Version kVersion{1, 0};
constexpr const char* kName = "dltensor";
constexpr const char* kVersionedName = "dltensor_versioned";

}  // namespace hsdp::python::dlpack
