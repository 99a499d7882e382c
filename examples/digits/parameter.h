// The weights of the digit network, by name: both trainings start from them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "hsdp/tensor_view.h"

namespace examples {

struct Parameter {
  std::string name;
  hsdp::Shape shape;
  std::vector<float> values;
};

// 64 -> 256 -> 128 -> 10: layer1.weight [64, 256] (inputs by outputs), layer1.bias [256], and so
// on. Uniform weights, zero biases; the same for the same seed.
[[nodiscard]] std::vector<Parameter> initial_parameters(std::uint64_t seed);

// All values one after another, as raw floats of this machine. Throw std::runtime_error; a file to
// read must have exactly the size of `parameters`.
void write_values(const std::filesystem::path& path, const std::vector<Parameter>& parameters);
void read_values(const std::filesystem::path& path, std::vector<Parameter>& parameters);

}  // namespace examples
