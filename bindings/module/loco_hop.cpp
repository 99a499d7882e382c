// LocoHop, the 4-bit replica hop. hsdp/quant.py wraps it for users.
#include "quant/loco_hop.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module/array_argument.h"
#include "bindings/module/bindings.h"
#include "bindings/module/interruptible_call.h"
#include "bindings/module/text_argument.h"
#include "hsdp/device/copy.h"
#include "hsdp/error.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;
using quant::LocoHop;
using quant::LocoOptions;

std::optional<quant::Code> gather_code(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  for (const quant::Code code : {quant::Code::kInt4, quant::Code::kInt8, quant::Code::kBf16}) {
    if (*text == name(code)) return code;
  }
  throw UsageError({.where = "loco: gather",
                    .expected = "None, 'int4', 'int8' or 'bf16'",
                    .got = "'" + *text + "'"});
}

Dtype dtype_of(const char* option, const std::string& text, const std::string& choices) {
  try {
    return parse_dtype(text);
  } catch (const UsageError&) {
    throw UsageError(
        {.where = std::string("loco: ") + option, .expected = choices, .got = "'" + text + "'"});
  }
}

Dtype error_dtype(const std::string& text) {
  return text == "int8" ? Dtype::kU8 : dtype_of("error_dtype", text, "'int8' or 'f32'");
}

std::shared_ptr<LocoHop> make_hop(int bits, int group_size, const std::string& scale_dtype,
                                  double err_beta, std::int64_t reset_steps,
                                  const std::string& errors,
                                  const std::optional<std::string>& gather, bool error_feedback,
                                  std::vector<std::string> exclude,
                                  const std::optional<std::string>& plain_dtype,
                                  std::int64_t warmup_steps, bool stochastic_error,
                                  std::uint64_t seed, std::int64_t error_every) {
  LocoOptions options;
  options.bits = bits;
  options.group_size = group_size;
  options.scale_dtype = dtype_of("scale_dtype", scale_dtype, "'bf16' or 'f32'");
  options.err_beta = err_beta;
  options.reset_T = reset_steps;
  options.error_dtype = error_dtype(errors);
  options.gather = gather_code(gather);
  options.error_feedback = error_feedback;
  options.exclude = std::move(exclude);
  if (plain_dtype)
    options.plain_dtype = dtype_of("plain_dtype", *plain_dtype, "'f32', 'bf16' or 'f16'");
  options.warmup_steps = warmup_steps;
  options.stochastic_error = stochastic_error;
  options.seed = seed;
  options.error_every = error_every;
  return std::make_shared<LocoHop>(std::move(options));
}

// Copies, in host memory.
py::dict state_of(LocoHop& hop) {
  const std::vector<HopState> state = call_released([&hop] { return hop.state(); });
  py::dict result;
  std::vector<void*> to;
  for (const HopState& one : state) {
    py::array array(py::dtype::from_args(numpy_dtype(one.data.dtype)),
                    std::vector<py::ssize_t>{one.data.count});
    to.push_back(array.mutable_data());
    result[py::str(one.key)] = array;
  }
  run_released([&] {
    for (std::size_t i = 0; i < state.size(); ++i) {
      const TensorView& from = state[i].data;
      if (from.count == 0) continue;
      Stream stream = Stream::create(from.device, "hsdp-loco");
      stream.run([&, inside = stream.inside_task()] {
        copy_bytes(to[i], from.data, from.size_in_bytes(), inside);
      });
      stream.synchronize();
    }
  });
  return result;
}

void load_state(LocoHop& hop, const py::dict& from, bool strict) {
  std::vector<HopState> state;
  std::vector<ArrayArgument> arrays;
  for (const auto& [key, value] : from) {
    const std::string name = text_argument(key, "loco: load_state_dict: key");
    const std::string what = "loco: load_state_dict: '" + name + "'";
    arrays.push_back(host_array_argument(value, what));
    const ConstTensorView view = contiguous(arrays.back(), what);
    state.push_back({name, {const_cast<void*>(view.data), view.count, view.dtype, view.device}});
  }
  call_released([&] { hop.load_state(state, strict); });
}

std::vector<std::string> keys_to_load(
    const LocoHop& hop, const std::vector<std::pair<std::string, std::int64_t>>& from) {
  std::vector<LocoHop::SavedKey> keys;
  keys.reserve(from.size());
  for (const auto& [key, count] : from) keys.push_back({key, count});
  return hop.keys_to_load(keys);
}

std::vector<std::tuple<std::string, double, double>> quantization_error(const LocoHop& hop) {
  std::vector<std::tuple<std::string, double, double>> rows;
  for (const quant::QuantizationError& one : hop.quantization_error()) {
    rows.emplace_back(one.parameter, one.scattered, one.gathered);
  }
  return rows;
}

}  // namespace

void bind_loco_hop(py::module_& module) {
  py::class_<LocoHop, ReplicaHop, std::shared_ptr<LocoHop>>(module, "LocoHop")
      .def(py::init(&make_hop))
      .def("steps_so_far", &LocoHop::steps)
      .def("scale",
           [](LocoHop& self, float factor) { call_released([&] { self.scale_errors(factor); }); })
      .def("errors_by_parameter", &quantization_error)
      .def("state", &state_of)
      .def("load", &load_state)
      .def("keys_to_load", &keys_to_load);
}

}  // namespace hsdp::python
