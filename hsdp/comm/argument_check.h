// Checks the arguments of collectives, for every engine; throws UsageError.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

struct GroupShape {
  int rank = 0;
  int size = 1;
};

void check(const ReduceScatter& args, GroupShape group);  // fills in the cut
void check(const AllReduce& args, GroupShape group);
void check_all_gather(ConstTensorView in, TensorView out, const RowCut& cut, GroupShape group);
void check_all_to_all(ConstTensorView in, TensorView out, const std::optional<RowCut>& cut,
                      GroupShape group);  // without a cut: equal rows
void check_broadcast(TensorView data, int root, GroupShape group);
void check_allocate(std::int64_t count, Dtype dtype, GroupShape group);

}  // namespace hsdp::comm
