// Compares two independent implementations of one network with each other and with difference
// quotients.
#include "examples/digits/mlp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "examples/digits/random_sequence.h"
#include "examples/digits/reference_model.h"

namespace examples {
namespace {

DigitSet random_images(std::size_t count) {
  RandomSequence random(11);
  DigitSet set;
  for (std::size_t i = 0; i < count * kPixelCount; ++i) {
    set.pixels.push_back(std::max(0.0F, random.next_within(1)));
  }
  for (std::size_t i = 0; i < count; ++i) {
    set.labels.push_back(static_cast<int>(random.next() % kClassCount));
  }
  return set;
}

TEST(ReferenceModel, GradientIsTheSlopeOfTheLoss) {
  const DigitSet images = random_images(3);
  ReferenceModel model(initial_parameters(5));
  const ReferenceGradient exact = model.mean_gradient(images);
  RandomSequence random(17);
  constexpr double kStep = 1e-5;
  for (std::size_t p = 0; p < exact.gradients.size(); ++p) {
    for (int sample = 0; sample < 20; ++sample) {
      const std::size_t i = random.next() % exact.gradients[p].size();
      double& weight = model.weights()[p][i];
      const double kept = weight;
      weight = kept + kStep;
      const double above = model.mean_gradient(images).mean_loss;
      weight = kept - kStep;
      const double below = model.mean_gradient(images).mean_loss;
      weight = kept;
      EXPECT_NEAR((above - below) / (2 * kStep), exact.gradients[p][i], 1e-8)
          << "parameter " << p << ", element " << i;
    }
  }
}

TEST(Mlp, AgreesWithTheReference) {
  const DigitSet images = random_images(16);
  Mlp model(initial_parameters(5));
  const ReferenceModel reference(model.parameters());
  const ReferenceGradient exact = reference.mean_gradient(images);
  EXPECT_NEAR(model.backward(images, [](std::size_t) {}), exact.mean_loss, 1e-6);
  for (std::size_t p = 0; p < exact.gradients.size(); ++p) {
    ASSERT_EQ(model.gradient(p).size(), exact.gradients[p].size());
    double largest = 0;
    double error = 0;
    for (std::size_t i = 0; i < exact.gradients[p].size(); ++i) {
      largest = std::max(largest, std::abs(exact.gradients[p][i]));
      error = std::max(error, std::abs(exact.gradients[p][i] - model.gradient(p)[i]));
    }
    EXPECT_GT(largest, 1e-3);
    EXPECT_LT(error, 1e-5 * largest) << model.parameters()[p].name;
  }
  EXPECT_EQ(model.accuracy(images), reference.accuracy(images));
}

TEST(Mlp, ReportsEachGradientOnceAndFromTheOutputBack) {
  const DigitSet images = random_images(2);
  Mlp model(initial_parameters(5));
  std::vector<std::size_t> reported;
  std::vector<std::vector<float>> values(model.parameters().size());
  static_cast<void>(model.backward(images, [&](std::size_t p) {
    reported.push_back(p);
    values[p] = model.gradient(p);
  }));
  EXPECT_EQ(reported, (std::vector<std::size_t>{5, 4, 3, 2, 1, 0}));
  for (std::size_t p = 0; p < values.size(); ++p) {
    EXPECT_EQ(values[p], model.gradient(p)) << "changed after it was reported";
  }
}

}  // namespace
}  // namespace examples
