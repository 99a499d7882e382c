// Arrays that come from Python: NumPy, anything with __dlpack__ (torch, JAX, CuPy), hsdp.Array, and
// plain buffers. Never copied.
//
// The view is good while `owner` lives; memory of a GPU is good on the caller's stream, from now
// on. UsageError says what came and what to do.
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

// What becomes of an array of complex numbers. Its real view has one more dimension, of 2.
enum class Complex : std::uint8_t { kRefused, kAsReal };
[[nodiscard]] inline Complex complex_of(bool is_complex) {
  return is_complex ? Complex::kAsReal : Complex::kRefused;
}

// `what` names the argument in errors: "reducer: gradient of 'w'". Memory of another device than
// the caller's is refused.
[[nodiscard]] ArrayArgument array_argument(pybind11::handle object, std::string_view what,
                                           CallerStream& caller,
                                           Complex of_complex = Complex::kRefused);
// The same for what works on host memory alone.
[[nodiscard]] ArrayArgument host_array_argument(pybind11::handle object, std::string_view what);

// For arguments that must be contiguous: inputs of collectives.
[[nodiscard]] ConstTensorView contiguous(const ArrayArgument& argument, std::string_view what);
// ... and writable: outputs and in-place arguments.
[[nodiscard]] TensorView writable(const ArrayArgument& argument, std::string_view what);

// dlpack_import.cpp
[[nodiscard]] ArrayArgument from_dlpack(pybind11::handle object, std::string_view what,
                                        CallerStream& caller, Complex of_complex);
// UsageError for complex numbers where no parameter is complex.
[[noreturn]] void refuse_complex(std::string_view what, const std::string& dtype);
// Of complex elements: the view has their shape and strides, and gets those of their real view.
void view_as_real(StridedView& view);
// UsageError unless an array's memory lies where the caller's does.
void require_device(Device device, std::string_view what, const CallerStream& caller);

// UsageError: "what: expected ..., got ...; remedy".
[[noreturn]] void refuse(std::string_view what, const std::string& expected, const std::string& got,
                         const std::string& remedy = {});

// "float32", "bfloat16" and the like as NumPy's dtype; bf16 is that of ml_dtypes.
[[nodiscard]] pybind11::object numpy_dtype(Dtype dtype);

}  // namespace hsdp::python
