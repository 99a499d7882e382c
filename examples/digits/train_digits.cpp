// Trains the digit network on a mesh of 2 replicas x 2 shards:
//
//   hsdp_run -n 4 train_digits --data digits.csv
//
// Four microbatches per step, gradients in bf16 on the wire, momentum only for this rank's slices.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>

#include "examples/digits/batch_source.h"
#include "examples/digits/mlp.h"
#include "examples/digits/program.h"
#include "examples/digits/sharded_momentum.h"
#include "examples/digits/training_options.h"
#include "examples/digits/training_result.h"
#include "examples/digits/world_agreement.h"
#include "hsdp/error.h"
#include "hsdp/reducer.h"

namespace examples {
namespace {

struct MeshTrainingOptions {
  TrainingOptions training;
  std::int64_t bucket_bytes = 16 << 10;
};

class MeshTraining {
 public:
  MeshTraining(const hsdp::Mesh& mesh, const MeshTrainingOptions& options);
  TrainingResult run();

 private:
  void step(std::size_t step);
  void run_microbatch(std::size_t step, std::size_t microbatch);
  void save_snapshot(std::size_t step);
  void update_weights();

  hsdp::Mesh mesh_;
  TrainingOptions options_;
  DigitData data_;
  BatchSource batches_;
  Mlp model_;
  ShardedMomentum optimizer_;
  hsdp::Reducer reducer_;
  std::vector<double> losses_;  // this rank's share of each step's mean loss
};

MeshTraining::MeshTraining(const hsdp::Mesh& mesh, const MeshTrainingOptions& options)
    : mesh_(mesh),
      options_(options.training),
      data_(load_digits(options_.data)),
      batches_(data_.train, options_, mesh.size()),
      model_(initial_parameters(options_.seed)),
      optimizer_(options_.learning_rate, options_.momentum),
      reducer_(mesh, {.reduce_dtype = hsdp::Dtype::kBf16, .bucket_bytes = options.bucket_bytes}) {
  // Register in the order in which gradients appear: the first bucket is complete first.
  const std::vector<Parameter>& parameters = model_.parameters();
  for (std::size_t p = parameters.size(); p-- > 0;) {
    reducer_.register_parameter({.name = parameters[p].name, .shape = parameters[p].shape});
  }
  // The mean over microbatches and ranks, not only over ranks.
  reducer_.set_gradient_divide_factor(static_cast<double>(options_.microbatch_count) *
                                      mesh_.size());
}

void MeshTraining::run_microbatch(std::size_t step, std::size_t microbatch) {
  const DigitSet images = batches_.microbatch(step, microbatch, mesh_.rank());
  const bool last = microbatch + 1 == options_.microbatch_count;
  hsdp::Microbatch scope(reducer_, {.last = last});
  const double loss = model_.backward(images, [&](std::size_t p) {
    const Parameter& parameter = model_.parameters()[p];
    reducer_.gradient_ready(parameter.name,
                            {.data = model_.gradient(p).data(), .shape = parameter.shape});
  });
  scope.end();
  losses_[step] += loss / static_cast<double>(options_.microbatch_count) / mesh_.size();
}

void MeshTraining::step(std::size_t step) {
  losses_.push_back(0);
  for (std::size_t microbatch = 0; microbatch < options_.microbatch_count; ++microbatch) {
    run_microbatch(step, microbatch);
  }
  if (options_.wants_snapshot(step + 1)) {
    save_snapshot(step + 1);
  }
  update_weights();
}

void MeshTraining::save_snapshot(std::size_t step) {
  reducer_.save_snapshot(options_.snapshot_path(step), static_cast<std::int64_t>(step));
  if (mesh_.rank() == 0) {
    write_values(options_.weights_path(step), model_.parameters());
  }
}

void MeshTraining::update_weights() {
  std::vector<hsdp::NamedArray> arrays;
  for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
    Parameter& parameter = model_.parameters()[p];
    const hsdp::TensorView mean = reducer_.shard(parameter.name);
    const hsdp::Slice slice = reducer_.slice(parameter.name);
    const auto count = static_cast<std::size_t>(slice.count);
    optimizer_.update(p, {static_cast<const float*>(mean.data), count},
                      {parameter.values.data() + slice.offset, count});
    arrays.push_back({parameter.name,
                      {.data = parameter.values.data(),
                       .count = static_cast<std::int64_t>(parameter.values.size())}});
  }
  reducer_.gather_parameters(arrays);  // gets the slices that other ranks updated
}

TrainingResult MeshTraining::run() {
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < options_.step_count; ++i) {
    step(i);
    if (mesh_.rank() == 0 && (i + 1) % 25 == 0) {
      std::printf("step %zu: loss %.4f on this rank\n", i + 1, losses_[i] * mesh_.size());
      std::fflush(stdout);
    }
  }
  reducer_.flush_snapshots();
  const hsdp::ReducerStats stats = reducer_.stats();
  TrainingResult result;
  result.losses = sum_over_world(mesh_.world(), losses_);
  result.test_accuracy = model_.accuracy(data_.test);
  result.hash = hash_of_bits(model_.parameters(), result.losses);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.bucket_count = stats.bucket_count;
  result.reduce_scatter_count = stats.reduce_scatter_count;
  result.all_reduce_count = stats.all_reduce_count;
  result.transport = stats.shard_transport;
  expect_same(mesh_.world(), result.hash);
  return result;
}

int run(int argc, char** argv) {
  MeshTrainingOptions options;
  auto description = describe(options.training);
  description.add_options()(
      "bucket-bytes",
      boost::program_options::value(&options.bucket_bytes)->default_value(options.bucket_bytes),
      "wire bytes of a bucket");
  if (!parse(argc, argv, description)) {
    return 0;
  }
  const hsdp::Mesh mesh = hsdp::init_mesh({.replicate = 2, .shard = 2, .timeout_s = 60});
  std::printf("rank %d of %d: pid %d, replica %d, shard %d\n", mesh.rank(), mesh.size(), getpid(),
              mesh.replica(), mesh.shard_rank());
  std::fflush(stdout);
  TrainingResult result;
  try {
    result = MeshTraining(mesh, options).run();
  } catch (const hsdp::RankError& error) {  // here a real job would save what it has
    std::fprintf(stderr, "rank %d raised: %s\n", mesh.rank(), error.what());
    return 1;
  }
  if (mesh.rank() == 0) {
    report(options.training.result, result);
  }
  return 0;
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) { return examples::run_program(examples::run, argc, argv); }
