#include "hsdp/compare.h"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <array>
#include <optional>
#include <string>

#include "bindings/module/bindings.h"
#include "bindings/module/interruptible_call.h"
#include "bindings/module/snapshot_info.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

constexpr std::array<const char*, 3> kVerdicts{"same", "different", "not judged"};
constexpr std::array<const char*, 4> kCriteria{"relative", "tolerance", "ulp", "bitwise"};

template <typename Enum, std::size_t size>
const char* word(Enum value, const std::array<const char*, size>& words) {
  return words.at(static_cast<std::size_t>(value));
}

py::dict histogram(const ErrorHistogram& h) {
  py::dict d;
  d["first_exponent"] = h.first_exponent;
  d["counts"] = py::tuple(py::cast(h.counts));
  d["zero_count"] = h.zero_count;
  return d;
}

py::dict difference(const ParameterDifference& p) {
  py::dict d;
  d["name"] = p.name;
  d["shape"] = py::tuple(py::cast(p.shape));
  d["coarsest_dtype"] = std::string(name(p.coarsest));
  d["limit"] = p.limit;
  d["max_absolute"] = p.max_absolute;
  d["max_relative"] = p.max_relative;
  d["relative_l2"] = p.relative_l2;
  d["max_ulp"] = p.max_ulp;
  d["cosine"] = p.cosine;
  d["max_b"] = p.max_b;
  d["nonfinite_a"] = p.nonfinite_a;
  d["nonfinite_b"] = p.nonfinite_b;
  d["nonfinite_mismatches"] = p.nonfinite_mismatches;
  d["failing"] = p.failing;
  d["worst_index"] = p.worst.index;
  d["worst_replica"] = p.worst.replica;
  d["worst_a"] = p.worst.a;
  d["worst_b"] = p.worst.b;
  d["verdict"] = word(p.verdict, kVerdicts);
  py::list heat;
  for (const HeatCell& cell : p.heat) heat.append(py::make_tuple(cell.max, cell.root_mean_square));
  d["heat"] = py::tuple(heat);
  d["histogram"] = histogram(p.histogram);
  return d;
}

CompareOptions parse_options(const py::dict& given) {
  CompareOptions options;
  options.rtol = given["rtol"].cast<std::optional<double>>();
  options.atol = given["atol"].cast<std::optional<double>>();
  options.ulp = given["ulp"].cast<std::optional<double>>();
  options.bitwise = given["bitwise"].cast<bool>();
  options.detail = given["detail"].cast<bool>();
  return options;
}

py::dict compare(const std::filesystem::path& a, const std::filesystem::path& b,
                 const py::dict& given) {
  const CompareOptions options = parse_options(given);
  const Comparison comparison = call_interruptibly(
      [a, b, options] { return compare_snapshots(Snapshot::open(a), Snapshot::open(b), options); });
  py::dict d;
  d["a"] = info_dict(comparison.a);
  d["b"] = info_dict(comparison.b);
  d["criterion"] = word(comparison.criterion, kCriteria);
  d["verdict"] = word(comparison.verdict, kVerdicts);
  py::list parameters;
  for (const ParameterDifference& p : comparison.parameters) parameters.append(difference(p));
  d["parameters"] = parameters;
  return d;
}

}  // namespace

void bind_compare(py::module_& module) { module.def("compare_snapshots", compare); }

}  // namespace hsdp::python
