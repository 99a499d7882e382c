// Python objects that the library keeps alive, and lets go from any thread
// [Note: letting go of Python objects].
//
// The library drops a gradient on threads of its own and under its locks, where Python must not
// run. So the last owner only puts the object aside; whoever next holds the GIL in a call of ours
// really lets it go. Thread-safe.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace hsdp::python {

// Keeps `object` alive until the last copy is gone. Needs the GIL.
[[nodiscard]] std::shared_ptr<const void> hold(pybind11::object object);

// Lets go of what was put aside. Needs the GIL; cheap when there is nothing.
void release_held();

}  // namespace hsdp::python
