// Times the work of one Reducer step written with MPI calls: cast and reduce-scatter each
// microbatch, add into an fp32 carry, all-reduce over replicas at the end, divide.
//
// The MPI standard has no bf16. So there are two ways, and a third if the library has bf16 (Intel
// MPI), each in several bucket sizes. The fastest one with right results counts.
//   f32     casts gradients to f32 and sums them with MPI_SUM
//   bf16    sends 16 bits; a user operation adds them and rounds at every addition
//   native  sends the library's bf16 and sums with MPI_SUM
#include <mpi.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "measurement.h"
#include "step_case.h"

namespace {

using hsdp::Bf16;
using hsdp::Dtype;
using hsdp::bench::Group;
using hsdp::bench::StepCase;

Group world() {
  Group group{.system = HSDP_PEER};
  MPI_Comm_rank(MPI_COMM_WORLD, &group.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &group.size);
  group.barrier = [] { MPI_Barrier(MPI_COMM_WORLD); };
  group.max = [](double value) {
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return value;
  };
  return group;
}

void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
  const auto* const a = static_cast<const Bf16*>(in);
  auto* const b = static_cast<Bf16*>(inout);
  for (int i = 0; i < *count; ++i)
    b[i] = hsdp::to_bf16(hsdp::to_float(a[i]) + hsdp::to_float(b[i]));
}

float decode(float x) { return x; }
float decode(Bf16 x) { return hsdp::to_float(x); }
void encode(float x, float& out) { out = x; }
void encode(float x, Bf16& out) { out = hsdp::to_bf16(x); }

struct Wire {
  MPI_Datatype type = MPI_FLOAT;
  MPI_Op sum = MPI_SUM;
};

// The step of one rank. A bucket has shard_size rows. They are cast next to each other, so that the
// reduce-scatter gives each rank elements of its own half of the parameters.
template <typename Gradient, typename OnWire>
class Step {
 public:
  Step(const StepCase& step, int rank, std::int64_t bucket_count, Wire wire)
      : step_(step),
        rank_(rank),
        row_(step.parameter_count / step.shard_size),
        bucket_row_(std::min(row_, bucket_count / step.shard_size)),
        wire_(wire),
        gradient_(
            hsdp::bench::private_memory(step.parameter_count * std::int64_t{sizeof(Gradient)})),
        staging_(hsdp::bench::private_memory(bucket_row_ * step.shard_size *
                                             std::int64_t{sizeof(OnWire)})),
        sum_(hsdp::bench::private_memory(bucket_row_ * std::int64_t{sizeof(OnWire)})),
        carry_(hsdp::bench::private_memory(row_ * 4)) {
    hsdp::bench::fill_input(gradient_.get(), step.gradient_dtype, 0, step.parameter_count, rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank / step.shard_size, rank, &shard_group_);
    MPI_Comm_split(MPI_COMM_WORLD, rank % step.shard_size, rank, &replicate_group_);
  }
  ~Step() {
    MPI_Comm_free(&shard_group_);
    MPI_Comm_free(&replicate_group_);
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  void run() {
    for (int microbatch = 0; microbatch < step_.microbatch_count; ++microbatch) {
      for (std::int64_t begin = 0; begin < row_; begin += bucket_row_) {
        const std::int64_t count = std::min(bucket_row_, row_ - begin);
        reduce_scatter(begin, count);
        add_into_carry(begin, count, microbatch == 0);
      }
    }
    for (std::int64_t begin = 0; begin < row_; begin += bucket_row_) {
      all_reduce(begin, std::min(bucket_row_, row_ - begin));
    }
  }

  [[nodiscard]] bool verify(double tolerance) const {
    return hsdp::bench::holds_mean(step_, carry(), row_ * (rank_ % step_.shard_size), row_,
                                   tolerance);
  }

 private:
  [[nodiscard]] float* carry() const { return static_cast<float*>(carry_.get()); }

  void reduce_scatter(std::int64_t begin, std::int64_t count) {
    const auto* const gradient = static_cast<const Gradient*>(gradient_.get());
    auto* const staging = static_cast<OnWire*>(staging_.get());
    for (int shard = 0; shard < step_.shard_size; ++shard) {
      const Gradient* const from = gradient + shard * row_ + begin;
      OnWire* const to = staging + shard * count;
      for (std::int64_t i = 0; i < count; ++i) encode(decode(from[i]), to[i]);
    }
    MPI_Reduce_scatter_block(staging, sum_.get(), static_cast<int>(count), wire_.type, wire_.sum,
                             shard_group_);
  }

  void add_into_carry(std::int64_t begin, std::int64_t count, bool first) {
    const auto* const sum = static_cast<const OnWire*>(sum_.get());
    float* const to = carry() + begin;
    if (first) {
      for (std::int64_t i = 0; i < count; ++i) to[i] = decode(sum[i]);
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i] += decode(sum[i]);
    }
  }

  void all_reduce(std::int64_t begin, std::int64_t count) {
    float* const to = carry() + begin;
    const auto factor = 1.0F / static_cast<float>(step_.shard_size * step_.replicate_size);
    auto* const on_wire = static_cast<OnWire*>(sum_.get());
    for (std::int64_t i = 0; i < count; ++i) encode(to[i], on_wire[i]);
    MPI_Allreduce(MPI_IN_PLACE, on_wire, static_cast<int>(count), wire_.type, wire_.sum,
                  replicate_group_);
    for (std::int64_t i = 0; i < count; ++i) to[i] = decode(on_wire[i]) * factor;
  }

  StepCase step_;
  int rank_;
  std::int64_t row_;
  std::int64_t bucket_row_;
  Wire wire_;
  std::shared_ptr<void> gradient_;
  std::shared_ptr<void> staging_;
  std::shared_ptr<void> sum_;
  std::shared_ptr<void> carry_;
  MPI_Comm shard_group_ = MPI_COMM_NULL;
  MPI_Comm replicate_group_ = MPI_COMM_NULL;
};

struct Variant {
  std::string name;
  std::int64_t bucket_count = 0;
  Wire wire;
  double tolerance = 0.0;
};

template <typename Gradient, typename OnWire>
void measure(const Group& group, const StepCase& what, const Variant& variant) {
  Step<Gradient, OnWire> step(what, group.rank, variant.bucket_count, variant.wire);
  hsdp::bench::measure_step(
      group, variant.name, what, [&] { step.run(); },
      [&] { return step.verify(variant.tolerance); });
}

template <typename OnWire>
void measure(const Group& group, const StepCase& what, const Variant& variant) {
  if (!what.only_variant.empty() && what.only_variant != variant.name) return;
  if (what.gradient_dtype == Dtype::kF32) {
    measure<float, OnWire>(group, what, variant);
  } else {
    measure<Bf16, OnWire>(group, what, variant);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const hsdp::bench::Arguments arguments = hsdp::bench::parse_arguments(argc, argv);
  const Group group = world();
  hsdp::bench::pin_to_core(group.rank);
  const StepCase what = hsdp::bench::step_case(arguments);
  if (group.size != what.replicate_size * what.shard_size) {
    if (group.rank == 0) std::fprintf(stderr, "peer_mpi_step: ranks: expected 4\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  Wire bf16;
  MPI_Type_contiguous(2, MPI_BYTE, &bf16.type);
  MPI_Type_commit(&bf16.type);
  MPI_Op_create(add_bf16, 1, &bf16.sum);
  for (const std::int64_t kibi_elements : {8192, 1024, 256}) {
    const std::string size = std::to_string(kibi_elements) + "K";
    const std::int64_t count = kibi_elements << 10;
    measure<float>(group, what, {"f32_" + size, count, Wire{}, 0.0});
    // One rounding per microbatch and two at the end, of values up to 2, 8 and 16, err by less than
    // 0.025.
    measure<Bf16>(group, what, {"bf16_" + size, count, bf16, 0.01});
#ifdef MPIX_C_BF16
    measure<Bf16>(group, what, {"native_" + size, count, {MPIX_C_BF16, MPI_SUM}, 0.01});
#endif
  }
  MPI_Op_free(&bf16.sum);
  MPI_Type_free(&bf16.type);
  MPI_Finalize();
  return 0;
}
