// Text from Python. A UsageError says what was passed instead.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "hsdp/error.h"

namespace hsdp::python {

[[nodiscard]] inline std::string type_name(pybind11::handle object) {
  return pybind11::str(pybind11::type::handle_of(object).attr("__name__"));
}

// `what` names the argument in errors: "reducer: layout".
[[nodiscard]] inline std::string text_argument(pybind11::handle object, std::string_view what) {
  if (!pybind11::isinstance<pybind11::str>(object)) {
    throw UsageError(std::string(what) + ": expected a string, got an object of type " +
                     type_name(object));
  }
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    throw UsageError(std::string(what) +
                     ": expected text that UTF-8 can hold, got lone surrogates");
  }
  return {text, static_cast<std::size_t>(size)};
}

}  // namespace hsdp::python
