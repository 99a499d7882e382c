#include "hsdp/reducer/parameter_table.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/snapshot.h"
#include "hsdp/snapshot/snapshot_header.h"

namespace hsdp::reducer {
namespace {

[[noreturn]] void refuse_parameter(const std::string& parameter, const std::string& expected,
                                   const std::string& got, const std::string& remedy = {}) {
  const std::string where = "reducer: parameter '" + parameter + "'";
  throw UsageError({.where = where, .expected = expected, .got = got, .remedy = remedy});
}

void check_dtypes(const ParameterSpec& spec) {
  if (!is_gradient_dtype(spec.dtype)) {
    refuse_parameter(spec.name, "a gradient dtype of f32, bf16, f16 or f64",
                     std::string(name(spec.dtype)));
  }
  if (spec.reduce_dtype && !sums_in_f32(*spec.reduce_dtype)) {
    refuse_parameter(spec.name, "a reduce_dtype of f32, bf16 or f16",
                     std::string(name(*spec.reduce_dtype)));
  }
}

// Names must fit into a snapshot, which may be written much later.
void check_name(const std::string& parameter) {
  if (parameter.empty()) {
    throw UsageError({.where = "reducer", .expected = "a parameter name", .got = "''"});
  }
  if (parameter.size() > kMaxNameBytes) {
    refuse_parameter(parameter.substr(0, 32) + "...",
                     "a name of at most " + std::to_string(kMaxNameBytes) + " bytes",
                     std::to_string(parameter.size()));
  }
  if (!is_snapshot_text(parameter)) refuse_parameter(parameter, "a name in UTF-8", "other bytes");
}

void check_shape(const ParameterSpec& spec) {
  constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;
  const auto negative = [](std::int64_t extent) { return extent < 0; };
  if (spec.shape.size() > kMaxDimensions) {  // it must fit into a snapshot
    refuse_parameter(spec.name, "at most " + std::to_string(kMaxDimensions) + " dimensions",
                     std::to_string(spec.shape.size()));
  }
  if (std::ranges::any_of(spec.shape, negative)) {
    refuse_parameter(spec.name, "extents of at least 0", to_string(spec.shape));
  }
  if (spec.is_complex && (spec.shape.empty() || spec.shape.back() != 2)) {
    refuse_parameter(spec.name, "a last dimension of 2 for complex numbers", to_string(spec.shape));
  }
  std::int64_t count = 1;
  for (const std::int64_t extent : spec.shape) {
    if (extent > kMaxCount || (count > 0 && extent > kMaxCount / count)) {
      refuse_parameter(spec.name, "at most 2^40 elements", to_string(spec.shape));
    }
    count *= extent;
  }
}

}  // namespace

std::string unknown_name_remedy(std::span<const ParameterSpec> specs, std::string_view name) {
  if (specs.empty()) return "register it before the first microbatch";
  for (const ParameterSpec& spec : specs) {
    if (spec.name.ends_with(name) || name.ends_with(spec.name)) {
      return "use '" + spec.name + "', as registered";
    }
  }
  return "use a name as registered, such as '" + specs.front().name + "'";
}

ParameterTable::ParameterTable(const ReducerOptions& options, int replicate_size)
    : options_(options), has_hop_(replicate_size > 1) {}

int ParameterTable::add(const ParameterSpec& spec) {
  check_name(spec.name);
  if (index_.contains(spec.name)) {
    refuse_parameter(spec.name, "a new name", "one registered already",
                     "register a shared parameter once");
  }
  check_shape(spec);
  check_dtypes(spec);
  early_layout_.reset();
  const int parameter = size();
  index_.emplace(spec.name, parameter);
  specs_.push_back(spec);
  counts_.push_back(element_count(spec.shape));
  const auto known = std::ranges::find(groups_, spec.group);
  group_of_.push_back(static_cast<int>(known - groups_.begin()));
  if (known == groups_.end()) groups_.push_back(spec.group);
  return parameter;
}

void ParameterTable::set_units(std::span<const int> units) {
  if (std::ssize(units) != size()) {
    throw UsageError({.where = "reducer: set_units",
                      .expected = std::to_string(size()) + " units, one per parameter",
                      .got = std::to_string(units.size())});
  }
  early_layout_.reset();
  for (std::size_t p = 0; p < specs_.size(); ++p) specs_[p].unit = units[p];
}

int ParameterTable::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  if (found != index_.end()) return found->second;
  throw UsageError({.where = "reducer",
                    .expected = "a registered parameter",
                    .got = "'" + std::string(name) + "'",
                    .remedy = unknown_name_remedy(specs_, name)});
}

Dtype ParameterTable::wire_dtype(int parameter) const {
  const ParameterSpec& s = spec(parameter);
  if (s.dtype == Dtype::kF64) return s.dtype;
  return s.reduce_dtype.value_or(options_.reduce_dtype.value_or(s.dtype));
}

int ParameterTable::find_group(const std::string& name) const {
  const auto found = std::ranges::find(groups_, name);
  if (found == groups_.end()) {
    std::string known;
    for (const std::string& group : groups_) {
      known += known.empty() ? "'" : ", '";
      known += group + "'";
    }
    throw UsageError(
        {.where = "reducer", .expected = "one of the groups " + known, .got = "'" + name + "'"});
  }
  return static_cast<int>(found - groups_.begin());
}

HopParameter ParameterTable::hop_parameter(int parameter) const {
  const ParameterSpec& s = spec(parameter);
  return {s.name, s.shape, s.dtype};
}

BucketLayout ParameterTable::make_layout(int shard_size) const {
  const ReplicaHop* const hop = has_hop_ ? options_.replica_hop.get() : nullptr;
  std::int64_t slice_multiple = hop != nullptr ? hop->slice_multiple() : 1;
  std::vector<LayoutParameter> all;
  all.reserve(specs_.size());
  for (int p = 0; p < size(); ++p) {
    Shape shape = spec(p).shape;
    if (spec(p).is_complex) {
      slice_multiple = std::lcm(slice_multiple, std::int64_t{2});
      if (shape.size() == 1) shape.insert(shape.begin(), 1);  // a scalar has one row, not two
    }
    all.push_back({.shape = std::move(shape),
                   .wire_dtype = wire_dtype(p),
                   .group = group_of(p),
                   .bucket_class = hop != nullptr ? hop->bucket_class(hop_parameter(p)) : 0,
                   .unit = spec(p).unit,
                   .is_complex = spec(p).is_complex});
  }
  return {all, shard_size, options_.layout, *options_.bucket_bytes, slice_multiple};
}

const BucketLayout& ParameterTable::early_layout(int shard_size) {
  if (!early_layout_) early_layout_ = make_layout(shard_size);
  return *early_layout_;
}

std::vector<std::string> ParameterTable::describe() const {
  std::vector<std::string> lines;
  lines.reserve(specs_.size());
  for (int p = 0; p < size(); ++p) {
    const ParameterSpec& s = spec(p);
    lines.push_back("'" + s.name + "' " + to_string(s.shape) + " " + std::string(name(s.dtype)) +
                    " reduced in " + std::string(name(wire_dtype(p))) + ", group '" + s.group +
                    "'" + (s.unit == 0 ? "" : ", unit " + std::to_string(s.unit)) +
                    (s.is_complex ? ", complex" : "") +
                    (has_hop_ && options_.shard_over == ShardOver::kMesh ? ", mesh-wide" : ""));
  }
  return lines;
}

}  // namespace hsdp::reducer
