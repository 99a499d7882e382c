// Arrays from Python: NumPy, anything with __dlpack__ (torch, JAX, CuPy), hsdp.Array, and plain
// buffers. Never copied.
//
// The view is valid while `owner` lives; GPU memory is valid on the caller's stream from now on. A
// UsageError says what was passed and what to do.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "bindings/module/caller_stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::python {

struct ArrayArgument {
  StridedView view;
  bool writable = true;
  pybind11::object owner;
};

// How to treat complex arrays. The real view has one more dimension, of 2.
enum class Complex : std::uint8_t { kRefused, kAsReal };
[[nodiscard]] inline Complex complex_of(bool is_complex) {
  return is_complex ? Complex::kAsReal : Complex::kRefused;
}

// `what` names the argument in errors: "reducer: gradient of 'w'". Rejects memory of another device
// than the caller's.
[[nodiscard]] ArrayArgument array_argument(pybind11::handle object, std::string_view what,
                                           CallerStream& caller,
                                           Complex of_complex = Complex::kRefused);
// The same for code that works only on host memory.
[[nodiscard]] ArrayArgument host_array_argument(pybind11::handle object, std::string_view what);

// For arguments that must be contiguous: inputs of collectives.
[[nodiscard]] ConstTensorView contiguous(const ArrayArgument& argument, std::string_view what);
// ... and writable: outputs and in-place arguments.
[[nodiscard]] TensorView writable(const ArrayArgument& argument, std::string_view what);

// in dlpack_import.cpp
[[nodiscard]] ArrayArgument from_dlpack(pybind11::handle object, std::string_view what,
                                        CallerStream& caller, Complex of_complex);
// Throws UsageError for complex numbers where no parameter is complex.
[[noreturn]] void refuse_complex(std::string_view what, const std::string& dtype);
// For complex elements: changes the shape and strides of the view to those of its real view.
void view_as_real(StridedView& view);
// Throws UsageError unless an array is on the caller's device.
void require_device(Device device, std::string_view what, const CallerStream& caller);

// Throws UsageError "what: expected ..., got ...; remedy".
[[noreturn]] void refuse(std::string_view what, const std::string& expected, const std::string& got,
                         const std::string& remedy = {});

// "float32", "bfloat16" etc. as NumPy's dtype; bf16 comes from ml_dtypes.
[[nodiscard]] pybind11::object numpy_dtype(Dtype dtype);

}  // namespace hsdp::python
