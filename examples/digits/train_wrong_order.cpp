// The digit training with hand-written collectives and an easy mistake: microbatches are added to
// what has been all-reduced, and all-reduced again. Every all-reduce counts the earlier
// microbatches twice. The loss still falls; hsdp_check finds the mistake.
//
//   hsdp_run -n 4 train_wrong_order --data digits.csv
#include <algorithm>
#include <chrono>

#include "examples/digits/batch_source.h"
#include "examples/digits/mlp.h"
#include "examples/digits/program.h"
#include "examples/digits/sharded_momentum.h"
#include "examples/digits/training_options.h"
#include "examples/digits/training_result.h"
#include "examples/digits/world_agreement.h"
#include "hsdp/mesh.h"
#include "hsdp/snapshot.h"

namespace examples {
namespace {

hsdp::TensorView view_of(std::vector<float>& values) {
  return {.data = values.data(), .count = static_cast<std::int64_t>(values.size())};
}

class WrongOrderTraining {
 public:
  WrongOrderTraining(const hsdp::Mesh& mesh, const TrainingOptions& options);
  TrainingResult run();

 private:
  void step(std::size_t step);
  void run_microbatch(std::size_t step, std::size_t microbatch);
  void write_snapshot(std::size_t step);
  void update_weights();

  hsdp::Mesh mesh_;
  TrainingOptions options_;
  DigitData data_;
  BatchSource batches_;
  Mlp model_;
  ShardedMomentum optimizer_;
  std::vector<float> flat_;   // all gradients, or all weights, one after another
  hsdp::RowCut cut_;          // of flat_ over the shard group
  std::vector<float> part_;   // this rank's row of one microbatch
  std::vector<float> carry_;  // this rank's row of all of them
  std::vector<double> losses_;
};

std::int64_t value_count(const std::vector<Parameter>& parameters) {
  std::int64_t count = 0;
  for (const Parameter& parameter : parameters) {
    count += static_cast<std::int64_t>(parameter.values.size());
  }
  return count;
}

WrongOrderTraining::WrongOrderTraining(const hsdp::Mesh& mesh, const TrainingOptions& options)
    : mesh_(mesh),
      options_(options),
      data_(load_digits(options_.data)),
      batches_(data_.train, options_, mesh.size()),
      model_(initial_parameters(options_.seed)),
      optimizer_(options_.learning_rate, options_.momentum),
      flat_(static_cast<std::size_t>(value_count(model_.parameters()))),
      cut_(value_count(model_.parameters()), mesh.shard_size()),
      part_(static_cast<std::size_t>(cut_.length(mesh.shard_rank()))),
      carry_(part_.size()) {}

void WrongOrderTraining::run_microbatch(std::size_t step, std::size_t microbatch) {
  const DigitSet images = batches_.microbatch(step, microbatch, mesh_.rank());
  auto next = flat_.begin();
  const double loss = model_.backward(images, [](std::size_t) {});
  for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
    next = std::copy(model_.gradient(p).begin(), model_.gradient(p).end(), next);
  }
  mesh_.shard_group().reduce_scatter(view_of(flat_), view_of(part_));
  for (std::size_t i = 0; i < carry_.size(); ++i) {
    carry_[i] += part_[i];
  }
  mesh_.replicate_group().all_reduce(view_of(carry_));  // the mistake: do it after the last one
  losses_[step] += loss / static_cast<double>(options_.microbatch_count) / mesh_.size();
}

void WrongOrderTraining::step(std::size_t step) {
  losses_.push_back(0);
  std::fill(carry_.begin(), carry_.end(), 0.0F);
  for (std::size_t microbatch = 0; microbatch < options_.microbatch_count; ++microbatch) {
    run_microbatch(step, microbatch);
  }
  const auto divisor =
      static_cast<float>(options_.microbatch_count) * static_cast<float>(mesh_.size());
  for (float& value : carry_) {
    value /= divisor;
  }
  if (options_.wants_snapshot(step + 1)) {
    write_snapshot(step + 1);
    if (mesh_.rank() == 0) {
      write_values(options_.weights_path(step + 1), model_.parameters());
    }
  }
  update_weights();
}

// The parts of the parameters in this rank's row.
void WrongOrderTraining::write_snapshot(std::size_t step) {
  const std::int64_t row_begin = cut_.begin(mesh_.shard_rank());
  const std::int64_t row_end = cut_.begin(mesh_.shard_rank() + 1);
  std::vector<hsdp::SnapshotEntry> entries;
  std::int64_t parameter_begin = 0;
  for (const Parameter& parameter : model_.parameters()) {
    const auto count = static_cast<std::int64_t>(parameter.values.size());
    const std::int64_t begin = std::clamp(row_begin, parameter_begin, parameter_begin + count);
    const std::int64_t end = std::clamp(row_end, parameter_begin, parameter_begin + count);
    entries.push_back({.name = parameter.name,
                       .shape = parameter.shape,
                       .offset = begin - parameter_begin,
                       .data = {carry_.data() + (begin < end ? begin - row_begin : 0), end - begin,
                                hsdp::Dtype::kF32}});
    parameter_begin += count;
  }
  hsdp::write_snapshot_file(
      options_.snapshot_path(step),
      {.id = "wrong order, step " + std::to_string(step),
       .step = static_cast<std::int64_t>(step),
       .replicate_size = mesh_.replicate_size(),
       .shard_size = mesh_.shard_size(),
       .rank = mesh_.rank(),
       .microbatch_count = static_cast<std::int64_t>(options_.microbatch_count),
       .divide_factor = static_cast<double>(options_.microbatch_count) * mesh_.size()},
      entries);
}

void WrongOrderTraining::update_weights() {
  auto next = flat_.begin();
  for (const Parameter& parameter : model_.parameters()) {
    next = std::copy(parameter.values.begin(), parameter.values.end(), next);
  }
  const std::span<float> row(flat_.data() + cut_.begin(mesh_.shard_rank()), carry_.size());
  optimizer_.update(0, carry_, row);
  mesh_.shard_group().all_gather(
      hsdp::TensorView{.data = row.data(), .count = static_cast<std::int64_t>(row.size())},
      view_of(flat_));
  auto source = flat_.cbegin();
  for (Parameter& parameter : model_.parameters()) {
    std::copy_n(source, parameter.values.size(), parameter.values.begin());
    source += static_cast<std::ptrdiff_t>(parameter.values.size());
  }
}

TrainingResult WrongOrderTraining::run() {
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < options_.step_count; ++i) {
    step(i);
  }
  TrainingResult result;
  result.losses = sum_over_world(mesh_.world(), losses_);
  result.test_accuracy = model_.accuracy(data_.test);
  result.hash = hash_of_bits(model_.parameters(), result.losses);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  expect_same(mesh_.world(), result.hash);
  return result;
}

int run(int argc, char** argv) {
  TrainingOptions options;
  const auto description = describe(options);
  if (!parse(argc, argv, description)) {
    return 0;
  }
  const hsdp::Mesh mesh = hsdp::init_mesh({.replicate = 2, .shard = 2, .timeout_s = 60});
  const TrainingResult result = WrongOrderTraining(mesh, options).run();
  if (mesh.rank() == 0) {
    report(options.result, result);
  }
  return 0;
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) { return examples::run_program(examples::run, argc, argv); }
