// The command-line options that all trainings of the digit network share.
#pragma once

#include <boost/program_options.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace examples {

struct TrainingOptions {
  std::filesystem::path data;
  std::size_t step_count = 150;
  std::size_t batch_size = 256;  // over all ranks and microbatches
  std::size_t microbatch_count = 4;
  double learning_rate = 0.15;
  double momentum = 0.9;
  std::uint64_t seed = 2024;

  std::filesystem::path result;           // losses, hash and counts as JSON; empty: none
  std::filesystem::path snapshot_folder;  // empty: none
  std::vector<std::size_t> snapshot_steps;

  [[nodiscard]] bool wants_snapshot(std::size_t step) const;
  // In snapshot_folder: the gradients of a step, and the weights it started from.
  [[nodiscard]] std::filesystem::path snapshot_path(std::size_t step) const;
  [[nodiscard]] std::filesystem::path weights_path(std::size_t step) const;
};

[[nodiscard]] boost::program_options::options_description describe(TrainingOptions& options);

// Returns false if --help was given and printed. Throws the exceptions of Boost.Program_options.
[[nodiscard]] bool parse(int argc, char** argv,
                         const boost::program_options::options_description& description);

}  // namespace examples
