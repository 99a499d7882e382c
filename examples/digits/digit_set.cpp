#include "examples/digits/digit_set.h"

#include <charconv>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "examples/digits/random_sequence.h"

namespace examples {
namespace {

constexpr int kWhite = 16;

// Takes the next number off the front of `line`.
int take_number(std::string_view& line, int largest) {
  int number = -1;
  const char* const end = line.data() + line.size();
  const auto [rest, error] = std::from_chars(line.data(), end, number);
  if (error != std::errc() || number < 0 || number > largest) {
    throw std::runtime_error("expected a number from 0 to " + std::to_string(largest) + ", got '" +
                             std::string(line.substr(0, 12)) + "'");
  }
  line.remove_prefix(static_cast<std::size_t>(rest - line.data()));
  return number;
}

void take_comma(std::string_view& line) {
  if (!line.starts_with(',')) {
    throw std::runtime_error("expected a comma, got '" + std::string(line.substr(0, 12)) + "'");
  }
  line.remove_prefix(1);
}

void append_image(std::string_view line, DigitSet& set) {
  for (std::size_t i = 0; i < kPixelCount; ++i) {
    set.pixels.push_back(static_cast<float>(take_number(line, kWhite)) / kWhite);
    take_comma(line);
  }
  set.labels.push_back(take_number(line, kClassCount - 1));
  if (!line.empty() && line != "\r") {
    throw std::runtime_error("expected 64 pixels and a label, got more");
  }
}

}  // namespace

DigitSet DigitSet::pick(std::span<const std::size_t> indices) const {
  DigitSet picked;
  for (const std::size_t index : indices) {
    const std::span<const float> source = image(index);
    picked.pixels.insert(picked.pixels.end(), source.begin(), source.end());
    picked.labels.push_back(labels[index]);
  }
  return picked;
}

DigitData load_digits(const std::filesystem::path& csv_path) {
  std::ifstream file(csv_path);
  if (!file) {
    throw std::runtime_error("digits: cannot open " + csv_path.string() +
                             ": run examples/fetch_digits.sh FILE to get it");
  }
  DigitData data;
  std::string line;
  for (std::size_t index = 0; std::getline(file, line); ++index) {
    try {
      append_image(line, index % 5 == 4 ? data.test : data.train);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error("digits: " + csv_path.string() + ", line " +
                               std::to_string(index + 1) + ": " + error.what());
    }
  }
  if (data.test.size() == 0) {
    throw std::runtime_error("digits: " + csv_path.string() + ": expected 5 images at least, got " +
                             std::to_string(data.train.size()));
  }
  return data;
}

std::vector<std::size_t> BatchOrder::indices(std::size_t begin, std::size_t length) {
  std::vector<std::size_t> result;
  result.reserve(length);
  for (std::size_t position = begin; position < begin + length; ++position) {
    if (order_.empty() || epoch_ != position / count_) {
      shuffle(position / count_);
    }
    result.push_back(order_[position % count_]);
  }
  return result;
}

void BatchOrder::shuffle(std::size_t epoch) {
  epoch_ = epoch;
  order_.resize(count_);
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  RandomSequence random(seed_ + epoch);
  for (std::size_t i = count_; i > 1; --i) {
    std::swap(order_[i - 1], order_[random.next() % i]);
  }
}

}  // namespace examples
