#include "examples/digits/training_options.h"

#include <algorithm>
#include <iostream>
#include <string>

namespace examples {

namespace po = boost::program_options;

bool TrainingOptions::wants_snapshot(std::size_t step) const {
  return !snapshot_folder.empty() &&
         std::find(snapshot_steps.begin(), snapshot_steps.end(), step) != snapshot_steps.end();
}

std::filesystem::path TrainingOptions::snapshot_path(std::size_t step) const {
  return snapshot_folder / ("step_" + std::to_string(step));
}

std::filesystem::path TrainingOptions::weights_path(std::size_t step) const {
  return snapshot_folder / ("weights_" + std::to_string(step) + ".f32");
}

po::options_description describe(TrainingOptions& options) {
  po::options_description description("Options", 100);
  auto add = description.add_options();
  add("help", "this list");
  add("data", po::value(&options.data)->required(), "the digits (fetch_digits.sh gets them)");
  add("steps", po::value(&options.step_count)->default_value(options.step_count),
      "optimizer steps");
  add("batch", po::value(&options.batch_size)->default_value(options.batch_size),
      "images in a step, over all ranks and microbatches");
  add("microbatches", po::value(&options.microbatch_count)->default_value(options.microbatch_count),
      "microbatches in a step");
  add("lr", po::value(&options.learning_rate)->default_value(options.learning_rate, "0.15"),
      "learning rate");
  add("seed", po::value(&options.seed)->default_value(options.seed), "of weights and batches");
  add("result", po::value(&options.result), "write losses, hash and counts to this JSON file");
  add("snapshots", po::value(&options.snapshot_folder), "write gradients into this folder");
  add("snapshot-step", po::value(&options.snapshot_steps)->composing(),
      "in this step, counted from 1; may be repeated");
  return description;
}

bool parse(int argc, char** argv, const po::options_description& description) {
  po::variables_map values;
  po::store(po::parse_command_line(argc, argv, description), values);
  if (values.count("help") != 0) {
    std::cout << description;
    return false;
  }
  po::notify(values);
  return true;
}

}  // namespace examples
