// The optical digits set: grey images of 8x8 pixels and the digit that each one shows.
// E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
// Repository, CC BY 4.0. examples/fetch_digits.sh downloads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace examples {

constexpr std::size_t kPixelCount = 64;
constexpr std::size_t kClassCount = 10;

// A sequence of images: a whole set or one batch of it.
struct DigitSet {
  std::vector<float> pixels;  // kPixelCount per image, 0 to 1
  std::vector<int> labels;

  [[nodiscard]] std::size_t size() const { return labels.size(); }
  [[nodiscard]] std::span<const float> image(std::size_t index) const {
    return std::span(pixels).subspan(index * kPixelCount, kPixelCount);
  }
  [[nodiscard]] DigitSet pick(std::span<const std::size_t> indices) const;
};

// Every fifth image is for testing.
struct DigitData {
  DigitSet train;
  DigitSet test;
};

// Lines of 64 pixels from 0 to 16 and a label, separated by commas. Throws std::runtime_error,
// naming the file and the line.
[[nodiscard]] DigitData load_digits(const std::filesystem::path& csv_path);

// Which images form which batch: epoch after epoch, each in an order that depends only on the seed.
// So every process of every run knows the batch of any step.
class BatchOrder {
 public:
  BatchOrder(std::size_t image_count, std::uint64_t seed) : count_(image_count), seed_(seed) {}
  // `length` images from position `begin` of the endless sequence of epochs.
  [[nodiscard]] std::vector<std::size_t> indices(std::size_t begin, std::size_t length);

 private:
  void shuffle(std::size_t epoch);

  std::size_t count_;
  std::uint64_t seed_;
  std::size_t epoch_ = 0;
  std::vector<std::size_t> order_;  // of epoch_; empty before the first use
};

}  // namespace examples
