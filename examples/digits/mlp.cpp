#include "examples/digits/mlp.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace examples {
namespace {

// y += a x. The compiler vectorizes it, since the elements are independent.
void add_scaled(float a, const float* x, float* y, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    y[i] += a * x[i];
  }
}

// Eight sums side by side, since one long chain of additions cannot be vectorized.
float dot(const float* x, const float* y, std::size_t count) {
  constexpr std::size_t kLanes = 8;
  std::array<float, kLanes> sums{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += x[i + lane] * y[i + lane];
    }
  }
  float sum = 0;
  for (; i < count; ++i) {
    sum += x[i] * y[i];
  }
  for (const float lane : sums) {
    sum += lane;
  }
  return sum;
}

}  // namespace

Mlp::Mlp(std::vector<Parameter> parameters) : parameters_(std::move(parameters)) {
  for (std::size_t p = 0; p < parameters_.size(); p += 2) {
    const hsdp::Shape& shape = parameters_[p].shape;
    layers_.push_back(
        {static_cast<std::size_t>(shape[0]), static_cast<std::size_t>(shape[1]), p, p + 1});
  }
  for (const Parameter& parameter : parameters_) {
    gradients_.emplace_back(parameter.values.size());
  }
  activations_.resize(layers_.size() + 1);
}

void Mlp::forward(const DigitSet& batch) {
  activations_[0] = batch.pixels;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    const std::vector<float>& weight = parameters_[layer.weight].values;
    const std::vector<float>& bias = parameters_[layer.bias].values;
    std::vector<float>& outputs = activations_[l + 1];
    outputs.resize(batch.size() * layer.out);
    for (std::size_t image = 0; image < batch.size(); ++image) {
      const float* const x = activations_[l].data() + image * layer.in;
      float* const y = outputs.data() + image * layer.out;
      std::copy(bias.begin(), bias.end(), y);
      for (std::size_t i = 0; i < layer.in; ++i) {
        if (x[i] != 0) {  // half of all pixels and activations are zero
          add_scaled(x[i], weight.data() + i * layer.out, y, layer.out);
        }
      }
    }
    if (l + 1 < layers_.size()) {
      std::replace_if(
          outputs.begin(), outputs.end(), [](float y) { return y < 0; }, 0.0F);
    }
  }
}

// Softmax and cross-entropy of the logits; stores the gradient of the mean loss by the logits.
double Mlp::loss_and_slope(const DigitSet& batch) {
  const auto count = static_cast<float>(batch.size());
  double loss = 0;
  slope_ = activations_.back();
  for (std::size_t image = 0; image < batch.size(); ++image) {
    float* const row = slope_.data() + image * kClassCount;
    const auto label = static_cast<std::size_t>(batch.labels[image]);
    const float largest = *std::max_element(row, row + kClassCount);
    const float label_logit = row[label] - largest;
    float sum = 0;
    for (std::size_t c = 0; c < kClassCount; ++c) {
      row[c] = std::exp(row[c] - largest);
      sum += row[c];
    }
    for (std::size_t c = 0; c < kClassCount; ++c) {
      row[c] /= sum * count;
    }
    row[label] -= 1 / count;
    loss += std::log(sum) - label_logit;
  }
  return loss / static_cast<double>(batch.size());
}

double Mlp::backward(const DigitSet& batch, const GradientReady& ready) {
  forward(batch);
  const double loss = loss_and_slope(batch);
  for (std::size_t l = layers_.size(); l-- > 0;) {
    const Layer& layer = layers_[l];
    bias_gradient(layer);
    ready(layer.bias);
    weight_gradient(layer, activations_[l]);
    ready(layer.weight);
    if (l > 0) {
      slope_of_inputs(layer, activations_[l]);
    }
  }
  return loss;
}

void Mlp::weight_gradient(const Layer& layer, const std::vector<float>& inputs) {
  std::vector<float>& gradient = gradients_[layer.weight];
  std::fill(gradient.begin(), gradient.end(), 0.0F);
  for (std::size_t image = 0; image < inputs.size() / layer.in; ++image) {
    for (std::size_t i = 0; i < layer.in; ++i) {
      const float x = inputs[image * layer.in + i];
      if (x != 0) {
        add_scaled(x, slope_.data() + image * layer.out, gradient.data() + i * layer.out,
                   layer.out);
      }
    }
  }
}

void Mlp::bias_gradient(const Layer& layer) {
  std::vector<float>& gradient = gradients_[layer.bias];
  std::fill(gradient.begin(), gradient.end(), 0.0F);
  for (std::size_t begin = 0; begin < slope_.size(); begin += layer.out) {
    add_scaled(1, slope_.data() + begin, gradient.data(), layer.out);
  }
}

// Where ReLU cut off an input, its gradient is zero.
void Mlp::slope_of_inputs(const Layer& layer, const std::vector<float>& inputs) {
  const std::vector<float>& weight = parameters_[layer.weight].values;
  std::vector<float> result(inputs.size());
  for (std::size_t image = 0; image < inputs.size() / layer.in; ++image) {
    for (std::size_t i = 0; i < layer.in; ++i) {
      if (inputs[image * layer.in + i] > 0) {
        result[image * layer.in + i] =
            dot(weight.data() + i * layer.out, slope_.data() + image * layer.out, layer.out);
      }
    }
  }
  slope_ = std::move(result);
}

double Mlp::accuracy(const DigitSet& set) {
  forward(set);
  std::size_t right_count = 0;
  for (std::size_t image = 0; image < set.size(); ++image) {
    const float* const row = activations_.back().data() + image * kClassCount;
    const auto likeliest = std::max_element(row, row + kClassCount) - row;
    right_count += likeliest == set.labels[image] ? 1U : 0U;
  }
  return static_cast<double>(right_count) / static_cast<double>(set.size());
}

}  // namespace examples
