// Collectives over MPI that only move bytes. Call each after group.agree(); it returns when it is
// complete on this rank.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/mpi/mpi_group.h"

namespace hsdp::comm {

void mpi_all_gather(MpiGroup& group, ConstTensorView in, TensorView out, const RowCut& cut);
void mpi_all_to_all(MpiGroup& group, ConstTensorView in, TensorView out, const RowCut& cut);
void mpi_broadcast(MpiGroup& group, TensorView data, int root);

}  // namespace hsdp::comm
