// Times one step of the Reducer on a 2x2 mesh, and its roofline: the reads and writes of that step
// on private memory, bucket by bucket, without synchronization. step_case.h says what a step is.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/sum_rows.h"
#include "hsdp/reducer.h"
#include "hsdp_group.h"
#include "step_case.h"

namespace {

using hsdp::Dtype;
using hsdp::Shape;
using hsdp::bench::Group;
using hsdp::bench::StepCase;

constexpr std::int64_t kParameterCount = std::int64_t{1} << 20;  // elements of one parameter

// This process's share of physical memory. Memory mapped by n processes counts as one nth.
std::int64_t proportional_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;) {
    std::int64_t kibibytes = 0;
    if (word == "Pss:" && rollup >> kibibytes) return kibibytes << 10;
  }
  return 0;
}

// The gradients of all parameters, one after another.
class Gradient {
 public:
  Gradient(const StepCase& what, int rank)
      : dtype_(what.gradient_dtype),
        count_(what.parameter_count),
        memory_(hsdp::bench::private_memory(count_ *
                                            static_cast<std::int64_t>(hsdp::size_bytes(dtype_)))) {
    hsdp::bench::fill_input(memory_.get(), dtype_, 0, count_, rank);
  }
  [[nodiscard]] hsdp::StridedView view(std::int64_t begin, std::int64_t count) const {
    return {.data = static_cast<const std::byte*>(memory_.get()) +
                    static_cast<std::size_t>(begin) * hsdp::size_bytes(dtype_),
            .dtype = dtype_,
            .shape = {count}};
  }

 private:
  Dtype dtype_;
  std::int64_t count_;
  std::shared_ptr<void> memory_;
};

class ReducerStep {
 public:
  ReducerStep(const hsdp::Mesh& mesh, const StepCase& what, const Gradient& gradient,
              std::int64_t bucket_bytes, std::int64_t verify_every)
      : what_(what),
        gradient_(gradient),
        reducer_(mesh, {.reduce_dtype = Dtype::kBf16,
                        .bucket_bytes = bucket_bytes,
                        .verify_every = verify_every}),
        parameters_(static_cast<int>(what.parameter_count / kParameterCount)) {
    for (int i = 0; i < parameters_; ++i) {
      reducer_.register_parameter(
          {.name = std::to_string(i), .shape = {kParameterCount}, .dtype = what.gradient_dtype});
    }
  }

  // Backward passes run from the last parameter to the first.
  void run() {
    for (int microbatch = 0; microbatch < what_.microbatch_count; ++microbatch) {
      reducer_.begin_microbatch({.last = microbatch + 1 == what_.microbatch_count});
      for (int i = parameters_ - 1; i >= 0; --i) {
        reducer_.gradient_ready(i, gradient_.view(i * kParameterCount, kParameterCount));
      }
      reducer_.end_microbatch();
    }
    for (int i = 0; i < parameters_; ++i) static_cast<void>(reducer_.shard(std::to_string(i)));
  }

  [[nodiscard]] bool verify() {
    bool right = true;
    for (int i = 0; i < parameters_; ++i) {
      const std::string name = std::to_string(i);
      const hsdp::TensorView shard = reducer_.shard(name);
      // The replica hop rounds shard sums up to 8 and totals up to 16 to bf16, which changes the
      // mean by less than 0.016.
      right = right && hsdp::bench::holds_mean(what_, static_cast<const float*>(shard.data),
                                               i * kParameterCount + reducer_.slice(name).offset,
                                               shard.count, 0.005);
    }
    return right;
  }

  [[nodiscard]] hsdp::ReducerStats stats() const { return reducer_.stats(); }

 private:
  StepCase what_;
  const Gradient& gradient_;
  hsdp::Reducer reducer_;
  int parameters_;
};

class PrivateStep {
 public:
  PrivateStep(const StepCase& what, const Gradient& gradient, std::int64_t bucket_bytes)
      : what_(what),
        gradient_(gradient),
        bucket_count_(bucket_bytes / 2),
        staging_(hsdp::bench::private_memory(bucket_bytes)),
        carry_(hsdp::bench::private_memory(what.parameter_count / what.shard_size * 4)) {}

  void run() {
    for (int microbatch = 0; microbatch < what_.microbatch_count; ++microbatch) {
      for (std::int64_t begin = 0; begin < what_.parameter_count; begin += bucket_count_) {
        const std::int64_t count = std::min(bucket_count_, what_.parameter_count - begin);
        pack(begin, count);
        reduce(begin, count, microbatch == 0);
        if (microbatch + 1 == what_.microbatch_count) hop(begin, count);
      }
    }
  }

  // The bytes that one rank reads and writes in run().
  [[nodiscard]] std::int64_t bytes() const {
    const std::int64_t count = what_.parameter_count;
    const std::int64_t shard = count / what_.shard_size;
    const auto element = static_cast<std::int64_t>(hsdp::size_bytes(what_.gradient_dtype));
    const std::int64_t microbatch = count * element + count * 2 + count * 2 + shard * 8;
    return what_.microbatch_count * microbatch - shard * 4 + shard * 8;
  }

 private:
  [[nodiscard]] float* carry(std::int64_t bucket_begin) const {
    return static_cast<float*>(carry_.get()) + bucket_begin / what_.shard_size;
  }

  void pack(std::int64_t begin, std::int64_t count) const {
    const hsdp::StridedView gradient = gradient_.view(begin, count);
    hsdp::kernels::cast_and_pack(
        {.gradient = &gradient, .count = count, .out_dtype = Dtype::kBf16, .out = staging_.get()});
  }

  void reduce(std::int64_t begin, std::int64_t count, bool first) const {
    const std::int64_t row = count / what_.shard_size;
    std::vector<const void*> rows;
    for (int shard = 0; shard < what_.shard_size; ++shard) {
      rows.push_back(static_cast<const hsdp::Bf16*>(staging_.get()) + shard * row);
    }
    void* const out = carry(begin);
    hsdp::kernels::sum_rows({.spec = {.row_dtype = Dtype::kBf16, .wire_dtype = Dtype::kBf16},
                             .rows = rows,
                             .add = first ? nullptr : carry(begin),
                             .outs = {&out, 1},
                             .count = row});
  }

  void hop(std::int64_t begin, std::int64_t count) const {
    const std::int64_t row = count / what_.shard_size / what_.replicate_size;
    std::vector<const void*> rows;
    std::vector<void*> outs;
    for (int replica = 0; replica < what_.replicate_size; ++replica) {
      rows.push_back(carry(begin) + replica * row);
      outs.push_back(carry(begin) + replica * row);
    }
    hsdp::kernels::sum_rows(
        {.spec = {.wire_dtype = Dtype::kBf16, .total_dtype = Dtype::kBf16, .divisor = 4.0F},
         .rows = rows,
         .outs = outs,
         .count = row});
  }

  StepCase what_;
  const Gradient& gradient_;
  std::int64_t bucket_count_;
  std::shared_ptr<void> staging_;
  std::shared_ptr<void> carry_;
};

// Prints the most bytes that any rank uses beyond the gradients, the carry and two staging buckets.
void report_memory(const Group& group, const hsdp::ReducerStats& stats, std::int64_t bucket_bytes,
                   std::int64_t process_bytes) {
  const std::int64_t allowed = stats.carry_bytes + 2 * bucket_bytes;
  const double by_stats = group.max(static_cast<double>(stats.peak_resident_bytes - allowed));
  const double by_process = group.max(static_cast<double>(process_bytes - allowed));
  if (group.rank != 0) return;
  std::printf("value step_memory_over_by_stats_bytes %.0f\n", by_stats);
  std::printf("value step_memory_over_by_process_bytes %.0f\n", by_process);
}

void measure_reducer(const hsdp::Mesh& mesh, const Group& group, const StepCase& what,
                     const Gradient& gradient, std::int64_t bucket_bytes,
                     std::int64_t verify_every) {
  const std::int64_t before_bytes = proportional_bytes();
  ReducerStep step(mesh, what, gradient, bucket_bytes, verify_every);
  step.run();
  group.barrier();
  const std::int64_t process_bytes = proportional_bytes() - before_bytes;
  hsdp::bench::measure_step(
      group, verify_every > 0 ? "verified" : "reducer", what, [&] { step.run(); },
      [&] { return step.verify(); });
  report_memory(group, step.stats(), bucket_bytes, process_bytes);
}

}  // namespace

int main(int argc, char** argv) {
  const hsdp::bench::Arguments arguments = hsdp::bench::parse_arguments(argc, argv);
  const StepCase what = hsdp::bench::step_case(arguments);
  const std::int64_t bucket_bytes =
      std::stoll(arguments.value("bucket_bytes", std::to_string(hsdp::kHostBucketBytes)));
  const hsdp::Mesh mesh =
      hsdp::init_mesh({.replicate = what.replicate_size, .shard = what.shard_size});
  hsdp::bench::pin_to_core(mesh.rank());
  const Group group = hsdp::bench::group_of(mesh.world(), "ours_step");
  const Gradient gradient(what, mesh.rank());
  const std::int64_t verify_every = std::stoll(arguments.value("verify_every", "0"));
  measure_reducer(mesh, group, what, gradient, bucket_bytes, verify_every);

  PrivateStep roofline(what, gradient, bucket_bytes);
  const Group roofline_group = hsdp::bench::group_of(mesh.world(), "roofline");
  const double roofline_us = hsdp::bench::median_us(roofline_group, [&] { roofline.run(); });
  hsdp::bench::report_step(roofline_group, "private", what, roofline_us, true);
  if (group.rank == 0) {
    std::printf("value step_%s_bytes_per_rank %lld\n",
                what.gradient_dtype == Dtype::kF32 ? "f32" : "bf16",
                static_cast<long long>(roofline.bytes()));
  }
  return 0;
}
