// Checks that an object is used in the process that made it. A forked child has neither threads nor
// connections of its parent: it may neither call nor destroy inherited objects.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/error.h"

namespace hsdp::python {

class OwnProcess {
 public:
  OwnProcess() : generation_(comm::fork_generation()) {}
  [[nodiscard]] bool here() const { return generation_ == comm::fork_generation(); }
  void require(const char* what) const {
    if (here()) return;
    throw UsageError({.where = what,
                      .expected = "the process that made it",
                      .got = "a forked child of that process",
                      .remedy = "use it in the parent, or start workers by spawn or forkserver"});
  }

 private:
  std::uint32_t generation_;
};

// A shared pointer whose object is never destroyed in a forked child. Elsewhere it is destroyed
// without the GIL, since its destructor may wait for threads of the library.
template <typename T>
std::shared_ptr<T> make_owned_by_process(T value) {
  const OwnProcess process;
  return {new T(std::move(value)), [process](T* object) {
            if (!process.here()) return;
            std::optional<pybind11::gil_scoped_release> released;
            if (PyGILState_Check() != 0) released.emplace();
            delete object;
          }};
}

}  // namespace hsdp::python
