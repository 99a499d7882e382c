#include "bindings/module/caller_stream.h"

#include <utility>

namespace hsdp::python {
namespace {

constexpr std::uintptr_t kLegacyDefault = 1;

Stream borrow(Device device, std::uintptr_t handle) {
  return Stream::borrow(device, reinterpret_cast<void*>(handle));  // NOLINT
}

std::uintptr_t handle_of(const Stream& stream) {
  return reinterpret_cast<std::uintptr_t>(stream.native_handle());
}

}  // namespace

Stream CallerStream::now(dlpack::CurrentStream ask) {
  if (on_host()) return Stream::inline_host();
  std::uintptr_t handle = 0;
  if (ask != nullptr && !is_set_) {
    const dlpack::DeviceId device = dlpack::device_id(device_);
    void* current = nullptr;
    if (ask(device.kind, device.index, &current) != 0) throw pybind11::error_already_set();
    handle = reinterpret_cast<std::uintptr_t>(current);
  } else if (source_) {
    handle = source_().cast<std::uintptr_t>();
  }
  if (handle == kLegacyDefault) handle = 0;
  if (!last_ || handle_of(*last_) != handle) last_ = borrow(device_, handle);
  return *last_;
}

std::uintptr_t dlpack_stream(const Stream& stream) {
  const std::uintptr_t handle = handle_of(stream);
  return handle == 0 ? kLegacyDefault : handle;
}

Stream stream_of_dlpack(Device device, std::uintptr_t stream) {
  return borrow(device, stream == kLegacyDefault ? 0 : stream);
}

}  // namespace hsdp::python
