#include "hsdp/comm/host/reduce_plan.h"

#include <algorithm>
#include <bit>

#include "hsdp/comm/host/host_call.h"

namespace hsdp::comm {

ElementRun all_reduce_slice(std::int64_t count, int size, int rank) {
  constexpr std::int64_t kBlock = 32;
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  const auto edge = [&](std::int64_t r) {
    const std::int64_t even = blocks / size * r + std::min<std::int64_t>(r, blocks % size);
    return std::min(count, even * kBlock);
  };
  const std::int64_t begin = edge(rank);
  return {begin, edge(rank + 1) - begin};
}

std::vector<ElementRun> slices_of(const ReduceScatter& args, int size) {
  std::vector<ElementRun> slices;
  slices.reserve(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) slices.push_back({args.cut->begin(r), args.cut->length(r)});
  return slices;
}

std::vector<ElementRun> slices_of(const AllReduce& args, int size) {
  std::vector<ElementRun> slices;
  slices.reserve(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) slices.push_back(all_reduce_slice(args.data.count, size, r));
  return slices;
}

std::uint64_t terms_of(const AllReduce& args) {
  TermsHash hash;
  hash.add(static_cast<std::uint64_t>(args.reduction));
  if (!args.planned) {
    hash.add(std::bit_cast<std::uint64_t>(args.divisor))
        .add(static_cast<std::uint64_t>(args.send_exponent))
        .add(static_cast<std::uint64_t>(args.total_exponent));
  }
  return hash.value();
}

Dtype wire_dtype(const AllReduce& args) { return args.wire.value_or(args.data.dtype); }

bool rounds_on_wire(const AllReduce& args) { return wire_dtype(args) != args.data.dtype; }

kernels::SumSpec sum_spec(const ReduceScatter& args) {
  return {.row_dtype = args.in.dtype,
          .wire_dtype = args.in.dtype,
          .sum_exponent = args.sum_exponent,
          .divisor = args.divisor,
          .out_dtype = args.out.dtype};
}

kernels::SumSpec sum_spec(const AllReduce& args) {
  kernels::SumSpec spec{.row_dtype = args.data.dtype,
                        .wire_dtype = args.data.dtype,
                        .divisor = args.divisor,
                        .out_dtype = args.data.dtype};
  if (rounds_on_wire(args)) {
    spec.wire_dtype = wire_dtype(args);
    spec.send_exponent = args.send_exponent;
    spec.total_dtype = spec.wire_dtype;
    spec.total_exponent = args.total_exponent - args.send_exponent;
    spec.result_exponent = args.total_exponent;
  }
  return spec;
}

kernels::SumSpec wire_sum_spec(const AllReduce& args) {
  return {.row_dtype = wire_dtype(args),
          .wire_dtype = wire_dtype(args),
          .sum_exponent = args.send_exponent - args.total_exponent,
          .out_dtype = wire_dtype(args)};
}

}  // namespace hsdp::comm
