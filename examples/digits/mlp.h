// A multilayer perceptron with ReLU and cross-entropy, written by hand: what every rank trains.
//
// backward() reports each gradient as soon as it exists, from the output layer back, so that its
// reduction runs while the layers before it are still being computed.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "examples/digits/digit_set.h"
#include "examples/digits/parameter.h"

namespace examples {

class Mlp {
 public:
  using GradientReady = std::function<void(std::size_t parameter)>;

  // Weight and bias of each layer in turn, as initial_parameters() makes them.
  explicit Mlp(std::vector<Parameter> parameters);

  // Gradients of the batch's mean loss, which it returns. gradient(p) stays as it is from ready(p)
  // until the next call.
  double backward(const DigitSet& batch, const GradientReady& ready);
  // The share of images whose likeliest class is their label.
  [[nodiscard]] double accuracy(const DigitSet& set);

  [[nodiscard]] std::vector<Parameter>& parameters() { return parameters_; }
  [[nodiscard]] const std::vector<float>& gradient(std::size_t parameter) const {
    return gradients_[parameter];
  }

 private:
  struct Layer {
    std::size_t in = 0;
    std::size_t out = 0;
    std::size_t weight = 0;  // indices of its parameters
    std::size_t bias = 0;
  };
  void forward(const DigitSet& batch);
  double loss_and_slope(const DigitSet& batch);
  void weight_gradient(const Layer& layer, const std::vector<float>& inputs);
  void bias_gradient(const Layer& layer);
  void slope_of_inputs(const Layer& layer, const std::vector<float>& inputs);

  std::vector<Parameter> parameters_;
  std::vector<std::vector<float>> gradients_;
  std::vector<Layer> layers_;
  std::vector<std::vector<float>> activations_;  // [layer]: its inputs, image by image; then logits
  std::vector<float> slope_;                     // of the loss, by the outputs of the current layer
};

}  // namespace examples
