#include "examples/digits/reference_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace examples {
namespace {

using Values = std::vector<double>;

Values affine(const Values& weight, const Values& bias, const Values& x) {
  Values y = bias;
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t o = 0; o < y.size(); ++o) {
      y[o] += weight[i * y.size() + o] * x[i];
    }
  }
  return y;
}

// log(sum(exp(y))), without overflow.
double log_of_exponential_sum(const Values& y) {
  const double largest = *std::max_element(y.begin(), y.end());
  double sum = 0;
  for (const double value : y) {
    sum += std::exp(value - largest);
  }
  return largest + std::log(sum);
}

}  // namespace

ReferenceModel::ReferenceModel(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters) {
    weights_.emplace_back(parameter.values.begin(), parameter.values.end());
  }
}

// The image itself first, the logits last.
std::vector<Values> ReferenceModel::outputs_of_layers(std::span<const float> image) const {
  std::vector<Values> outputs = {Values(image.begin(), image.end())};
  for (std::size_t p = 0; p < weights_.size(); p += 2) {
    Values y = affine(weights_[p], weights_[p + 1], outputs.back());
    const bool hidden = p + 2 < weights_.size();
    if (hidden) {
      for (double& value : y) {
        value = std::max(value, 0.0);
      }
    }
    outputs.push_back(std::move(y));
  }
  return outputs;
}

void ReferenceModel::add_image(std::span<const float> image, std::size_t label,
                               ReferenceGradient& total) const {
  const std::vector<Values> outputs = outputs_of_layers(image);
  const double log_sum = log_of_exponential_sum(outputs.back());
  total.mean_loss += log_sum - outputs.back()[label];

  Values delta(kClassCount);
  for (std::size_t c = 0; c < kClassCount; ++c) {
    delta[c] = std::exp(outputs.back()[c] - log_sum) - (c == label ? 1.0 : 0.0);
  }
  for (std::size_t p = weights_.size(); p > 0; p -= 2) {
    const Values& weight = weights_[p - 2];
    Values& weight_gradient = total.gradients[p - 2];
    Values& bias_gradient = total.gradients[p - 1];
    const Values& x = outputs[p / 2 - 1];
    Values delta_of_inputs(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t o = 0; o < delta.size(); ++o) {
        weight_gradient[i * delta.size() + o] += x[i] * delta[o];
        delta_of_inputs[i] += x[i] > 0 ? weight[i * delta.size() + o] * delta[o] : 0.0;
      }
    }
    for (std::size_t o = 0; o < delta.size(); ++o) {
      bias_gradient[o] += delta[o];
    }
    delta = std::move(delta_of_inputs);
  }
}

ReferenceGradient ReferenceModel::mean_gradient(const DigitSet& batch) const {
  ReferenceGradient total;
  for (const Values& weight : weights_) {
    total.gradients.emplace_back(weight.size());
  }
  for (std::size_t i = 0; i < batch.size(); ++i) {
    add_image(batch.image(i), static_cast<std::size_t>(batch.labels[i]), total);
  }
  const auto count = static_cast<double>(batch.size());
  total.mean_loss /= count;
  for (Values& gradient : total.gradients) {
    for (double& value : gradient) {
      value /= count;
    }
  }
  return total;
}

double ReferenceModel::accuracy(const DigitSet& set) const {
  std::size_t right_count = 0;
  for (std::size_t i = 0; i < set.size(); ++i) {
    const Values logits = outputs_of_layers(set.image(i)).back();
    const auto likeliest = std::max_element(logits.begin(), logits.end()) - logits.begin();
    right_count += likeliest == set.labels[i] ? 1U : 0U;
  }
  return static_cast<double>(right_count) / static_cast<double>(set.size());
}

}  // namespace examples
