// hsdp._hsdp: the library as seen by the Python package. The package wraps everything here; names
// and signatures of this module are private.
#include <pybind11/pybind11.h>

#include "bindings/module/bindings.h"

PYBIND11_MODULE(_hsdp, module) {
  module.doc() = "The C++ library behind the package hsdp.";
  module.attr("__version__") = HSDP_VERSION;
  hsdp::python::bind_parts(module);
}
