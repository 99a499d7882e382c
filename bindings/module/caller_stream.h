// Where the caller's work on the mesh's device runs. On a GPU, a framework's current stream, which
// may differ between calls and threads; on the host, the calling thread [Note: whose stream].
//
// Needs the GIL. Nothing here waits.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "bindings/module/dlpack_abi.h"
#include "hsdp/device/stream.h"

namespace hsdp::python {

class CallerStream {
 public:
  CallerStream() = default;  // for calls without a mesh: the host
  explicit CallerStream(Device device) : device_(device), of_mesh_(true) {}

  // `source()` is called at each use and returns a cudaStream_t as an int. `is_set`: the program
  // has named this stream, and it overrides any framework.
  void follow(pybind11::object source, bool is_set) {
    source_ = std::move(source);
    is_set_ = is_set;
  }

  // The calling thread's current stream. `ask`: the function of the framework that an array comes
  // from, called instead of the source; null: it has none.
  [[nodiscard]] Stream now(dlpack::CurrentStream ask = nullptr);
  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] bool on_host() const { return device_.type == DeviceType::kHost; }
  [[nodiscard]] bool of_mesh() const { return of_mesh_; }

 private:
  Device device_;
  bool of_mesh_ = false;
  pybind11::object source_;
  bool is_set_ = false;
  std::optional<Stream> last_;
};

// A stream in DLPack's numbering: 1 is the legacy default stream.
[[nodiscard]] std::uintptr_t dlpack_stream(const Stream& stream);
[[nodiscard]] Stream stream_of_dlpack(Device device, std::uintptr_t stream);

}  // namespace hsdp::python
