#include "hsdp/comm/mpi/mpi_copy.h"

#include <cstring>

namespace hsdp::comm {
namespace {

void copy_own(void* to, const void* from, std::size_t size) {
  if (to != from && size > 0) std::memcpy(to, from, size);
}

// Every rank except `left_out` gets each rank's row in its place.
void gather_rows(MpiGroup& group, ConstTensorView own, TensorView all, const RowCut& cut,
                 int left_out) {
  MpiTransfers transfers = group.transfers();
  for (int distance = 1; distance < group.size(); ++distance) {
    const int from = (group.rank() + group.size() - distance) % group.size();
    const TensorView row = all.slice(cut.begin(from), cut.length(from));
    if (group.rank() != left_out) {
      transfers.receive(group.peer(from), row.data, row.size_in_bytes());
    }
  }
  for (int distance = 1; distance < group.size(); ++distance) {
    const int to = (group.rank() + distance) % group.size();
    if (to != left_out) transfers.send(group.peer(to), own.data, own.size_in_bytes());
  }
  group.wait(transfers);
}

// The root sends a part to every rank, and the ranks exchange their parts: no rank sends more than
// twice the message, however many there are.
void scatter_parts(MpiGroup& group, TensorView data, const RowCut& cut, int root) {
  MpiTransfers transfers = group.transfers();
  for (int r = 0; r < group.size(); ++r) {
    if (r == root) continue;
    const TensorView part = data.slice(cut.begin(r), cut.length(r));
    if (group.rank() == root) {
      transfers.send(group.peer(r), part.data, part.size_in_bytes());
    } else if (group.rank() == r) {
      transfers.receive(group.peer(root), part.data, part.size_in_bytes());
    }
  }
  group.wait(transfers);
}

void send_to_all(MpiGroup& group, TensorView data, int root) {
  MpiTransfers transfers = group.transfers();
  if (group.rank() != root) {
    transfers.receive(group.peer(root), data.data, data.size_in_bytes());
  } else {
    for (int r = 0; r < group.size(); ++r) {
      if (r != root) transfers.send(group.peer(r), data.data, data.size_in_bytes());
    }
  }
  group.wait(transfers);
}

}  // namespace

void mpi_all_gather(MpiGroup& group, ConstTensorView in, TensorView out, const RowCut& cut) {
  constexpr int kNobody = -1;
  copy_own(out.slice(cut.begin(group.rank()), in.count).data, in.data, in.size_in_bytes());
  gather_rows(group, in, out, cut, kNobody);
}

void mpi_all_to_all(MpiGroup& group, ConstTensorView in, TensorView out, const RowCut& cut) {
  MpiTransfers transfers = group.transfers();
  const std::int64_t row = cut.length(group.rank());
  for (int distance = 1; distance < group.size(); ++distance) {
    const int from = (group.rank() + group.size() - distance) % group.size();
    const TensorView received = out.slice(from * row, row);
    transfers.receive(group.peer(from), received.data, received.size_in_bytes());
  }
  for (int distance = 1; distance < group.size(); ++distance) {
    const int to = (group.rank() + distance) % group.size();
    const ConstTensorView sent = in.slice(cut.begin(to), cut.length(to));
    transfers.send(group.peer(to), sent.data, sent.size_in_bytes());
  }
  const ConstTensorView own = in.slice(cut.begin(group.rank()), row);
  copy_own(out.slice(group.rank() * row, row).data, own.data, own.size_in_bytes());
  group.wait(transfers);
}

void mpi_broadcast(MpiGroup& group, TensorView data, int root) {
  constexpr std::size_t kWorthParts = std::size_t{64} << 10;
  if (group.size() == 2 || data.size_in_bytes() < kWorthParts) {
    send_to_all(group, data, root);
    return;
  }
  const RowCut cut(data.count, group.size());
  scatter_parts(group, data, cut, root);
  gather_rows(group, data.slice(cut.begin(group.rank()), cut.length(group.rank())), data, cut,
              root);
}

}  // namespace hsdp::comm
