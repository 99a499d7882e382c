// A hand-written multilayer perceptron with ReLU and cross-entropy, which every rank trains.
//
// backward() reports each gradient as soon as it exists, from the output layer back, so that it is
// reduced while earlier layers are still being computed.
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

  // Weight and bias of each layer in turn, as returned by initial_parameters().
  explicit Mlp(std::vector<Parameter> parameters);

  // Computes the gradients of the batch's mean loss and returns the loss. gradient(p) does not
  // change from ready(p) until the next call.
  double backward(const DigitSet& batch, const GradientReady& ready);
  // The fraction of images whose most likely class is their label.
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
  std::vector<float> slope_;                     // of the loss, by the current layer's outputs
};

}  // namespace examples
