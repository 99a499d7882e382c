#include "examples/digits/parameter.h"

#include <array>
#include <cmath>
#include <fstream>
#include <stdexcept>

#include "examples/digits/digit_set.h"
#include "examples/digits/random_sequence.h"

namespace examples {
namespace {

constexpr std::array<std::size_t, 4> kWidths = {kPixelCount, 256, 128, kClassCount};

std::streamsize size_in_bytes(const Parameter& parameter) {
  return static_cast<std::streamsize>(parameter.values.size() * sizeof(float));
}

}  // namespace

std::vector<Parameter> initial_parameters(std::uint64_t seed) {
  RandomSequence random(seed);
  std::vector<Parameter> parameters;
  for (std::size_t layer = 1; layer < kWidths.size(); ++layer) {
    const std::size_t in = kWidths[layer - 1];
    const std::size_t out = kWidths[layer];
    const std::string name = "layer" + std::to_string(layer);
    Parameter weight{name + ".weight", {static_cast<int>(in), static_cast<int>(out)}, {}};
    const float limit = std::sqrt(6.0F / static_cast<float>(in));  // keeps the variance under ReLU
    for (std::size_t i = 0; i < in * out; ++i) {
      weight.values.push_back(random.next_within(limit));
    }
    parameters.push_back(std::move(weight));
    parameters.push_back({name + ".bias", {static_cast<int>(out)}, std::vector<float>(out)});
  }
  return parameters;
}

void write_values(const std::filesystem::path& path, const std::vector<Parameter>& parameters) {
  std::ofstream file(path, std::ios::binary);
  for (const Parameter& parameter : parameters) {
    file.write(reinterpret_cast<const char*>(parameter.values.data()), size_in_bytes(parameter));
  }
  file.close();
  if (!file) {
    throw std::runtime_error("weights: cannot write " + path.string());
  }
}

void read_values(const std::filesystem::path& path, std::vector<Parameter>& parameters) {
  std::ifstream file(path, std::ios::binary);
  for (Parameter& parameter : parameters) {
    file.read(reinterpret_cast<char*>(parameter.values.data()), size_in_bytes(parameter));
  }
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error("weights: " + path.string() + " is missing or of another size");
  }
}

}  // namespace examples
