// The same network in float64, sharing only weights and images: one image at a time, one loop per
// formula. It is slow and serves as a reference.
#pragma once

#include <cstddef>
#include <vector>

#include "examples/digits/digit_set.h"
#include "examples/digits/parameter.h"

namespace examples {

// Gradients in the order of the parameters.
struct ReferenceGradient {
  double mean_loss = 0;
  std::vector<std::vector<double>> gradients;
};

class ReferenceModel {
 public:
  explicit ReferenceModel(const std::vector<Parameter>& parameters);

  [[nodiscard]] ReferenceGradient mean_gradient(const DigitSet& batch) const;
  [[nodiscard]] double accuracy(const DigitSet& set) const;
  [[nodiscard]] std::vector<std::vector<double>>& weights() { return weights_; }

 private:
  using Values = std::vector<double>;
  [[nodiscard]] std::vector<Values> outputs_of_layers(std::span<const float> image) const;
  void add_image(std::span<const float> image, std::size_t label, ReferenceGradient& total) const;

  std::vector<Values> weights_;  // weight and bias of each layer in turn
};

}  // namespace examples
