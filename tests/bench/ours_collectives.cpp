// Times reduce-scatter and all-reduce of hsdp, in memory that peers read directly and in private
// memory, and the roofline: the same reads and writes on private memory without synchronization.
//
//   ours_collectives [--system=ours_shared|ours_private|roofline] [--engine=host|mpi] [--idle]
//                    [--words] CASE...
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/kernels/sum_rows.h"
#include "hsdp_group.h"

namespace {

using hsdp::Communicator;
using hsdp::Dtype;
using hsdp::bench::ArrayOperation;
using hsdp::bench::Case;
using hsdp::bench::Group;
using hsdp::bench::Op;

ArrayOperation::Array array(Communicator& world, bool shared, std::int64_t count, Dtype dtype) {
  if (shared) {
    const hsdp::SharedMemory memory = world.allocate(count, dtype);
    return {memory.owner(), memory.view().data, dtype, 0, count};
  }
  auto memory = hsdp::bench::private_memory(count * (dtype == Dtype::kF32 ? 4 : 2));
  void* const data = memory.get();
  return {std::move(memory), data, dtype, 0, count};
}

void measure_ours(Communicator& world, const Group& group, const Case& what, bool shared) {
  const ArrayOperation::Array in = array(world, shared, what.count(), what.dtype);
  if (what.op == Op::kAllReduce) {
    ArrayOperation operation(group, in, in, [&] {
      world.all_reduce(hsdp::TensorView{in.data, in.count, in.dtype});
    });
    hsdp::bench::measure(group, "in_place", what, operation);
    return;
  }
  // The sums are fp32 for every input dtype.
  const std::int64_t row = what.count() / group.size;
  ArrayOperation::Array out = array(world, false, row, Dtype::kF32);
  out.begin = row * group.rank;
  ArrayOperation operation(group, in, out, [&] {
    world.reduce_scatter(hsdp::ConstTensorView(in.data, in.count, in.dtype),
                         hsdp::TensorView{out.data, out.count, out.dtype});
  });
  hsdp::bench::measure(group, "widening", what, operation);
}

// This rank's share of the work, all of it in private memory.
class PrivateSum : public hsdp::bench::Operation {
 public:
  PrivateSum(const Group& group, const Case& what, bool streaming_stores)
      : group_(group),
        dtype_(what.dtype),
        row_(what.count() / group.size),
        in_(hsdp::bench::private_memory(what.bytes)),
        streaming_stores_(streaming_stores) {
    for (int rank = 0; rank < group.size; ++rank) rows_.push_back(row_data(rank));
    if (what.op == Op::kAllReduce) {
      for (int rank = 0; rank < group.size; ++rank) outs_.push_back(row_data(rank));
      out_dtype_ = dtype_;
    } else {
      out_ = hsdp::bench::private_memory(row_ * 4);
      outs_.push_back(out_.get());
    }
  }

  void fill() override {
    for (int rank = 0; rank < group_.size; ++rank) {
      hsdp::bench::fill_input(row_data(rank), dtype_, row_ * group_.rank, row_, rank);
    }
  }
  void run() override {
    hsdp::kernels::sum_rows({.spec = {.row_dtype = dtype_, .out_dtype = out_dtype_},
                             .rows = rows_,
                             .outs = outs_,
                             .count = row_,
                             .streaming_stores = streaming_stores_});
  }
  [[nodiscard]] bool verify() const override {
    return hsdp::bench::holds_sum(outs_[0], out_dtype_, row_ * group_.rank, row_, group_.size);
  }
  void clear() override {
    std::memset(in_.get(), 0,
                static_cast<std::size_t>(group_.size * row_) * hsdp::size_bytes(dtype_));
  }

 private:
  [[nodiscard]] void* row_data(int rank) const {
    return static_cast<std::byte*>(in_.get()) +
           static_cast<std::size_t>(rank * row_) * hsdp::size_bytes(dtype_);
  }

  const Group& group_;
  Dtype dtype_;
  Dtype out_dtype_ = Dtype::kF32;
  std::int64_t row_;
  std::shared_ptr<void> in_;
  std::shared_ptr<void> out_;
  std::vector<const void*> rows_;
  std::vector<void*> outs_;
  bool streaming_stores_;
};

void measure_roofline(const Group& group, const Case& what) {
  for (const bool streaming_stores : {false, true}) {
    PrivateSum operation(group, what, streaming_stores);
    hsdp::bench::measure(group, streaming_stores ? "streaming" : "cached", what, operation);
  }
}

double process_cpu_s() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Measures the CPU time of ranks that wait in a collective which the last rank enters late.
void measure_idle(Communicator& world, const Group& group) {
  constexpr double kWaitS = 2.0;
  std::vector<float> data(1024, 1.0F);
  group.barrier();
  const double start_s = process_cpu_s();
  if (group.rank == group.size - 1) {
    std::this_thread::sleep_for(std::chrono::duration<double>(kWaitS));
  }
  world.all_reduce(hsdp::TensorView{data.data(), 1024, Dtype::kF32});
  const double used_percent = (process_cpu_s() - start_s) / kWaitS * 100.0;
  const double most_percent = group.max(used_percent);
  if (group.rank == 0) std::printf("value idle_rank_cpu_percent %.3f\n", most_percent);
}

// Times an exchange of equal words between all ranks over the control connection.
void measure_words(Communicator& world, const Group& group) {
  constexpr int kWords = 300;
  const std::string word(60, 'w');
  const auto say = [&] { static_cast<void>(world.exchange(word, "measure words")); };
  for (int i = 0; i < kWords / 10; ++i) say();
  const double cpu_s = process_cpu_s();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kWords; ++i) say();
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
  if (group.rank != 0) return;
  std::printf("value word_us %.1f\n", wall.count() * 1e6 / kWords);
  std::printf("value word_rank_0_cpu_us %.1f\n", (process_cpu_s() - cpu_s) * 1e6 / kWords);
}

}  // namespace

int main(int argc, char** argv) {
  const hsdp::bench::Arguments arguments = hsdp::bench::parse_arguments(argc, argv);
  const std::string system = arguments.value("system", "ours_shared");
  Communicator world = hsdp::connect_world({.engine = arguments.value("engine", "host")});
  const Group group = hsdp::bench::group_of(world, system);
  hsdp::bench::pin_to_core(group.rank);
  if (arguments.has("--idle")) measure_idle(world, group);
  if (arguments.has("--words")) measure_words(world, group);
  for (const Case& what : arguments.cases) {
    if (system == "roofline") {
      measure_roofline(group, what);
    } else {
      measure_ours(world, group, what, system == "ours_shared");
    }
  }
  group.barrier();
  return 0;
}
