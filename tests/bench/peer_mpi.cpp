// Times reduce-scatter and all-reduce of an MPI library. Compiled once per MPI, which HSDP_PEER
// names.
#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "measurement.h"

namespace {

using hsdp::bench::ArrayOperation;
using hsdp::bench::Case;
using hsdp::bench::Group;
using hsdp::bench::Op;

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

void reduce_scatter(const Group& group, const Case& what) {
  const std::int64_t count = what.count();
  const std::int64_t row = count / group.size;
  const auto in = hsdp::bench::private_memory(what.bytes);
  const auto out = hsdp::bench::private_memory(what.bytes / group.size);
  const ArrayOperation::Array input{in, in.get(), what.dtype, 0, count};
  const ArrayOperation::Array output{out, out.get(), what.dtype, row * group.rank, row};
  ArrayOperation block(group, input, output, [&] {
    MPI_Reduce_scatter_block(in.get(), out.get(), static_cast<int>(row), MPI_FLOAT, MPI_SUM,
                             MPI_COMM_WORLD);
  });
  hsdp::bench::measure(group, "block", what, block);
  const std::vector<int> rows(static_cast<std::size_t>(group.size), static_cast<int>(row));
  ArrayOperation ragged(group, input, output, [&] {
    MPI_Reduce_scatter(in.get(), out.get(), rows.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  });
  hsdp::bench::measure(group, "ragged", what, ragged);
}

void all_reduce(const Group& group, const Case& what) {
  const std::int64_t count = what.count();
  const auto in = hsdp::bench::private_memory(what.bytes);
  const auto out = hsdp::bench::private_memory(what.bytes);
  const ArrayOperation::Array input{in, in.get(), what.dtype, 0, count};
  ArrayOperation apart(group, input, {out, out.get(), what.dtype, 0, count}, [&] {
    MPI_Allreduce(in.get(), out.get(), static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  });
  hsdp::bench::measure(group, "apart", what, apart);
  ArrayOperation in_place(group, input, input, [&] {
    MPI_Allreduce(MPI_IN_PLACE, in.get(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  });
  hsdp::bench::measure(group, "in_place", what, in_place);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const hsdp::bench::Arguments arguments = hsdp::bench::parse_arguments(argc, argv);
  const Group group = world();
  hsdp::bench::pin_to_core(group.rank);
  for (const Case& what : arguments.cases) {
    if (what.dtype != hsdp::Dtype::kF32) continue;  // MPI has no 16-bit float type
    if (what.op == Op::kReduceScatter) {
      reduce_scatter(group, what);
    } else {
      all_reduce(group, what);
    }
  }
  MPI_Finalize();
  return 0;
}
