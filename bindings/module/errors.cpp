// Maps the library's exceptions to the classes of hsdp.errors.
#include <pybind11/stl.h>

#include <exception>
#include <vector>

#include "bindings/module/bindings.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

void raise(const char* name, const Error& error, const std::vector<int>& ranks = {}) {
  const py::object type = py::module_::import("hsdp.errors").attr(name);
  const py::object value = type(error.what(), py::arg("ranks") = py::tuple(py::cast(ranks)));
  PyErr_SetObject(type.ptr(), value.ptr());
}

void translate(std::exception_ptr thrown) {
  if (!thrown) return;
  try {
    std::rethrow_exception(thrown);
  } catch (const PeerLostError& error) {
    raise("PeerLostError", error, error.ranks());
  } catch (const TimeoutError& error) {
    raise("TimeoutError", error, error.ranks());
  } catch (const MismatchError& error) {
    raise("MismatchError", error, error.ranks());
  } catch (const StepAbortedError& error) {
    raise("StepAbortedError", error, error.ranks());
  } catch (const RankError& error) {
    raise("Error", error, error.ranks());
  } catch (const UsageError& error) {
    raise("UsageError", error);
  } catch (const SnapshotError& error) {
    raise("SnapshotError", error);
  } catch (const Error& error) {
    raise("Error", error);
  }
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr thrown) { translate(thrown); });
}

}  // namespace hsdp::python
