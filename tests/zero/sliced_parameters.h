// A rank's parameters, for tests of what updates and gathers them: whole arrays, of each of which
// the rank owns a slice, and fp32 masters of these slices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/reducer_step.h"
#include "zero/parameter_gather.h"

namespace hsdp::test {

class SlicedParameters {
 public:
  enum class Masters { kNone, kOf16Bits, kOfAll };

  // Registers the parameters. Their values are whole(spec), rounded to their dtypes.
  SlicedParameters(Reducer& reducer, std::vector<ParameterSpec> specs, Masters masters,
                   const std::function<Values(const ParameterSpec&)>& whole)
      : specs_(std::move(specs)), masters_(masters) {
    for (const ParameterSpec& spec : specs_) reducer.register_parameter(spec);
    reducer.prepare();
    for (std::size_t p = 0; p < specs_.size(); ++p) {
      slices_.push_back(reducer.slice(specs_[p].name));
      arrays_.push_back(rounded(p, whole(specs_[p])));
      masters_of_.emplace_back(static_cast<std::size_t>(slices_[p].count));
      update(p, whole(specs_[p]));
    }
  }

  // Writes this rank's slice of `whole`, as an optimizer does.
  void update(std::size_t p, const Values& whole) {
    const auto [begin, count] = slices_[p];
    if (has_master(p)) {
      std::copy_n(whole.begin() + begin, count, masters_of_[p].begin());
    } else {
      const auto size = static_cast<std::int64_t>(size_bytes(specs_[p].dtype));
      std::copy_n(rounded(p, whole).begin() + begin * size, count * size,
                  arrays_[p].begin() + begin * size);
    }
  }
  [[nodiscard]] TensorView array(std::size_t p) {
    return {arrays_[p].data(), element_count(specs_[p].shape), specs_[p].dtype, {}};
  }
  // Where an optimizer writes: to the master, or to the slice of the array.
  [[nodiscard]] TensorView own(std::size_t p) {
    if (!has_master(p)) return array(p).slice(slices_[p].offset, slices_[p].count);
    return {masters_of_[p].data(), slices_[p].count, Dtype::kF32, {}};
  }
  [[nodiscard]] std::vector<zero::GatheredParameter> gathered() {
    std::vector<zero::GatheredParameter> all;
    for (std::size_t p = 0; p < specs_.size(); ++p) {
      all.push_back({.name = specs_[p].name, .array = array(p)});
      if (has_master(p)) all.back().master = own(p);
    }
    return all;
  }
  // Checks that the array holds `whole`, rounded.
  void expect(std::size_t p, const Values& whole, const std::string& label) const {
    expect_same_bits(decoded(arrays_[p], specs_[p].dtype),
                     decoded(rounded(p, whole), specs_[p].dtype), label + " " + specs_[p].name);
  }
  [[nodiscard]] const std::vector<ParameterSpec>& specs() const { return specs_; }

 private:
  [[nodiscard]] bool has_master(std::size_t p) const {
    return masters_ == Masters::kOfAll ||
           (masters_ == Masters::kOf16Bits && specs_[p].dtype != Dtype::kF32);
  }
  [[nodiscard]] std::vector<std::byte> rounded(std::size_t p, Values whole) const {
    for (float& value : whole) value = round_to(specs_[p].dtype, value);
    return encoded(whole, specs_[p].dtype);
  }

  std::vector<ParameterSpec> specs_;
  Masters masters_;
  std::vector<Slice> slices_;
  std::vector<std::vector<std::byte>> arrays_;
  std::vector<Values> masters_of_;
};

}  // namespace hsdp::test
