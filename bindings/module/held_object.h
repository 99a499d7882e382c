// Python objects that the library keeps alive and releases from any thread
// [Note: letting go of Python objects].
//
// The library drops gradients on its own threads and under its locks, where Python must not run. So
// the last owner only puts the object aside; the next call of ours that holds the GIL releases it.
// Thread-safe.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace hsdp::python {

// Keeps `object` alive until the last copy is gone. Needs the GIL.
[[nodiscard]] std::shared_ptr<const void> hold(pybind11::object object);

// Releases what was put aside. Needs the GIL; cheap if there is nothing.
void release_held();

}  // namespace hsdp::python
