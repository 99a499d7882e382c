// SGD with momentum in which each rank updates only its own slice of every parameter: its momentum
// takes 1/S of the memory.
#pragma once

#include <span>
#include <vector>

namespace examples {

class ShardedMomentum {
 public:
  ShardedMomentum(double learning_rate, double momentum)
      : learning_rate_(static_cast<float>(learning_rate)),
        momentum_(static_cast<float>(momentum)) {}

  // values -= learning rate * velocity, for slice number `slice`, whose length never changes.
  void update(std::size_t slice, std::span<const float> gradient, std::span<float> values) {
    if (velocities_.size() <= slice) {
      velocities_.resize(slice + 1);
    }
    std::vector<float>& velocity = velocities_[slice];
    velocity.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      velocity[i] = momentum_ * velocity[i] + gradient[i];
      values[i] -= learning_rate_ * velocity[i];
    }
  }

 private:
  float learning_rate_;
  float momentum_;
  std::vector<std::vector<float>> velocities_;
};

}  // namespace examples
