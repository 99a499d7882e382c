// The result of a training, as a JSON file that the demo reads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "examples/digits/parameter.h"

namespace examples {

struct TrainingResult {
  std::vector<double> losses;  // mean over the whole batch, before each step's update
  double test_accuracy = 0;
  std::string hash;  // of all bits of the final weights and of the losses
  double seconds = 0;

  int bucket_count = 0;
  std::int64_t reduce_scatter_count = 0;  // over the whole training, like the next
  std::int64_t all_reduce_count = 0;
  std::string transport;
};

// FNV-1a, 64 bits, as hexadecimal digits.
[[nodiscard]] std::string hash_of_bits(const std::vector<Parameter>& parameters,
                                       std::span<const double> losses);

// Prints a summary of the training, and writes the file as below.
void report(const std::filesystem::path& path, const TrainingResult& result);

// Throw std::runtime_error, naming the file. An empty path writes nothing.
void write_result(const std::filesystem::path& path, const TrainingResult& result);
[[nodiscard]] TrainingResult read_result(const std::filesystem::path& path);

}  // namespace examples
