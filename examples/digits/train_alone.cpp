// The same training in one process, in float64, without hsdp: the reference for the mesh.
//
//   train_alone --data digits.csv                                     the whole training
//   train_alone --data digits.csv --gradient-of-step 20 --weights W --output A.h5
//                                                one step's gradient at given weights, a snapshot
#include <chrono>
#include <string>

#include "examples/digits/batch_source.h"
#include "examples/digits/program.h"
#include "examples/digits/reference_model.h"
#include "examples/digits/training_options.h"
#include "examples/digits/training_result.h"
#include "hsdp/snapshot.h"

namespace examples {
namespace {

struct AloneOptions {
  TrainingOptions training;
  std::size_t gradient_of_step = 0;  // from 1; 0: train
  std::filesystem::path weights;
  std::filesystem::path output;
};

TrainingResult train(const TrainingOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const DigitData data = load_digits(options.data);
  BatchSource batches(data.train, options, 1);
  ReferenceModel model(initial_parameters(options.seed));
  std::vector<std::vector<double>> velocities;
  for (const std::vector<double>& values : model.weights()) {
    velocities.emplace_back(values.size());
  }

  TrainingResult result;
  for (std::size_t step = 0; step < options.step_count; ++step) {
    const ReferenceGradient mean = model.mean_gradient(batches.whole_batch(step));
    result.losses.push_back(mean.mean_loss);
    for (std::size_t p = 0; p < velocities.size(); ++p) {
      for (std::size_t i = 0; i < velocities[p].size(); ++i) {
        velocities[p][i] = options.momentum * velocities[p][i] + mean.gradients[p][i];
        model.weights()[p][i] -= options.learning_rate * velocities[p][i];
      }
    }
  }
  result.test_accuracy = model.accuracy(data.test);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

void write_gradient(const AloneOptions& options) {
  std::vector<Parameter> parameters = initial_parameters(options.training.seed);
  read_values(options.weights, parameters);
  BatchSource batches(load_digits(options.training.data).train, options.training, 1);
  const ReferenceGradient mean =
      ReferenceModel(parameters).mean_gradient(batches.whole_batch(options.gradient_of_step - 1));

  std::vector<hsdp::SnapshotEntry> entries;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const std::vector<double>& gradient = mean.gradients[p];
    entries.push_back(
        {.name = parameters[p].name,
         .shape = parameters[p].shape,
         .data = {gradient.data(), static_cast<std::int64_t>(gradient.size()), hsdp::Dtype::kF64}});
  }
  const auto step = static_cast<std::int64_t>(options.gradient_of_step);
  hsdp::write_snapshot_file(
      options.output,
      {.id = "reference of step " + std::to_string(step), .step = step, .layout = "full"}, entries);
}

int run(int argc, char** argv) {
  namespace po = boost::program_options;
  AloneOptions options;
  auto description = describe(options.training);
  auto add = description.add_options();
  add("gradient-of-step", po::value(&options.gradient_of_step),
      "do not train: compute the gradient of this step, counted from 1");
  add("weights", po::value(&options.weights), "at these weights");
  add("output", po::value(&options.output), "and write it to this snapshot (.h5)");
  if (!parse(argc, argv, description)) {
    return 0;
  }
  if (options.gradient_of_step > 0) {
    write_gradient(options);
    return 0;
  }
  const TrainingResult result = train(options.training);
  report(options.training.result, result);
  return 0;
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) { return examples::run_program(examples::run, argc, argv); }
