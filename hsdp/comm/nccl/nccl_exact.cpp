#include "hsdp/comm/nccl/nccl_exact.h"

#include <algorithm>
#include <vector>

#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/comm/nccl/nccl_group.h"
#include "hsdp/comm/nccl/nccl_work.h"
#include "hsdp/device/copy.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp::comm {
namespace {

// Where the rows of a sum lie: peers' rows in work memory, this rank's in place, unless there are
// so many that all must lie at equal distances.
class Rows {
 public:
  Rows(const NcclGroup& group, ConstTensorView own, std::byte* work, Stream& stream)
      : own_rank_(group.rank()),
        size_(group.size()),
        pitch_(work_size(own.size_in_bytes())),
        own_(own),
        work_(work) {
    if (own_in_work()) copy_bytes(place(own_rank_), own.data, own.size_in_bytes(), stream);
  }

  [[nodiscard]] std::byte* place(int rank) const {
    const int index = own_in_work() || rank < own_rank_ ? rank : rank - 1;
    return work_ + static_cast<std::size_t>(index) * pitch_;
  }
  [[nodiscard]] std::vector<const void*> all() const {
    std::vector<const void*> rows(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) {
      rows[static_cast<std::size_t>(r)] = r == own_rank_ && !own_in_work() ? own_.data : place(r);
    }
    return rows;
  }

 private:
  [[nodiscard]] bool own_in_work() const { return size_ > kMostListedRows; }

  int own_rank_;
  int size_;
  std::size_t pitch_;
  ConstTensorView own_;
  std::byte* work_;
};

// Calls visit(rank) for every peer; each rank begins with its neighbour.
template <typename Visit>
void each_peer(const NcclGroup& group, Visit visit) {
  for (int step = 1; step < group.size(); ++step) visit((group.rank() + step) % group.size());
}

// Row r of `in` goes to peer r; the row from peer r arrives at place(r).
template <typename Place>
void exchange_rows(NcclGroup& group, ConstTensorView in, const RowCut& cut, Stream& stream,
                   Place place) {
  if (in.count == 0) return;
  const std::size_t own_bytes = in.slice(0, cut.length(group.rank())).size_in_bytes();
  group.send_group([&](NcclHandle on) {
    each_peer(group, [&](int peer) {
      const ConstTensorView row = in.slice(cut.begin(peer), cut.length(peer));
      if (row.count > 0) {
        group.library().send(row.data, row.size_in_bytes(), peer, on, stream.native_handle());
      }
    });
    each_peer(group, [&](int peer) {
      if (own_bytes == 0) return;
      group.library().receive(place(peer), own_bytes, peer, on, stream.native_handle());
    });
  });
}

void sum_into(TensorView out, const Rows& rows, const kernels::SumSpec& spec, Stream& stream) {
  const std::vector<const void*> all = rows.all();
  void* const place = out.data;
  if (out.count == 0) return;
  kernels::sum_rows({.spec = spec, .rows = all, .outs = {&place, 1}, .count = out.count}, stream);
}

// Rows and totals travel in the data's own dtype.
void all_reduce_as_it_is(NcclGroup& group, const AllReduce& args, Stream& stream) {
  const RowCut cut = sum_cut(args.data.count, group.size());
  const TensorView own = args.data.slice(cut.begin(group.rank()), cut.length(group.rank()));
  std::byte* const work =
      group.work(work_bytes(args, group.size()), group.in_is_registered(), stream);
  const Rows rows(group, own, work, stream);
  exchange_rows(group, args.data, cut, stream, [&](int r) { return rows.place(r); });
  sum_into(own, rows, sum_spec(args), stream);
  gather_rows(group, own, args.data, cut, stream);
  if (args.nonfinite != nullptr) kernels::find_nonfinite(args.data, args.nonfinite, stream);
}

// For f32 data: rows are rounded to the wire dtype once, and so are the totals.
void all_reduce_rounded(NcclGroup& group, const AllReduce& args, Stream& stream) {
  const std::int64_t count = args.data.count;
  const RowCut cut = sum_cut(count, group.size());
  const std::size_t bytes = work_bytes(args, group.size());
  std::byte* const work = group.work(bytes, group.memory().has_work(bytes, true), stream);
  const TensorView wire{work, count, wire_dtype(args), args.data.device};
  kernels::scale_and_cast({.in = args.data.data,
                           .out = wire.data,
                           .out_dtype = wire.dtype,
                           .count = count,
                           .exponent = -args.send_exponent},
                          stream);
  const TensorView own = wire.slice(cut.begin(group.rank()), cut.length(group.rank()));
  const Rows rows(group, own, work + work_size(wire.size_in_bytes()), stream);
  exchange_rows(group, wire, cut, stream, [&](int r) { return rows.place(r); });
  sum_into(own, rows, wire_sum_spec(args), stream);
  gather_rows(group, own, wire, cut, stream);
  kernels::scale_and_cast({.in = wire.data,
                           .in_dtype = wire.dtype,
                           .out = args.data.data,
                           .count = count,
                           .exponent = args.total_exponent,
                           .divisor = args.divisor,
                           .nonfinite = args.nonfinite},
                          stream);
}

}  // namespace

void exact_reduce_scatter(NcclGroup& group, const ReduceScatter& args, Stream& stream) {
  const RowCut& cut = *args.cut;
  std::byte* const work =
      group.work(work_bytes(args, group.size()), group.in_is_registered(), stream);
  const Rows rows(group, args.in.slice(cut.begin(group.rank()), cut.length(group.rank())), work,
                  stream);
  exchange_rows(group, args.in, cut, stream, [&](int r) { return rows.place(r); });
  if (args.out.count == 0) return;
  const std::vector<const void*> all = rows.all();
  void* const out = args.out.data;
  kernels::sum_rows({.spec = sum_spec(args),
                     .rows = all,
                     .add = args.accumulate ? out : nullptr,
                     .outs = {&out, 1},
                     .count = args.out.count,
                     .nonfinite = args.nonfinite},
                    stream);
}

void exact_all_reduce(NcclGroup& group, const AllReduce& args, Stream& stream) {
  if (args.data.count == 0) return;
  if (rounds_on_wire(args)) {
    all_reduce_rounded(group, args, stream);
  } else {
    all_reduce_as_it_is(group, args, stream);
  }
}

void gather_rows(NcclGroup& group, ConstTensorView in, TensorView out, const RowCut& cut,
                 Stream& stream) {
  if (out.count == 0) return;
  const auto row = [&](int r) { return out.slice(cut.begin(r), cut.length(r)); };
  const TensorView own = row(group.rank());
  bool even = true;
  for (int r = 0; r < group.size(); ++r) even = even && cut.length(r) == cut.length(0);
  if (even) {
    group.send_group([&](NcclHandle on) {
      group.library().all_gather(in.data, out.data, in.size_in_bytes(), on, stream.native_handle());
    });
    return;
  }
  if (own.data != in.data) copy_bytes(own.data, in.data, in.size_in_bytes(), stream);
  group.send_group([&](NcclHandle on) {
    each_peer(group, [&](int peer) {
      if (in.count == 0) return;
      group.library().send(own.data, in.size_in_bytes(), peer, on, stream.native_handle());
    });
    each_peer(group, [&](int peer) {
      if (row(peer).count == 0) return;
      group.library().receive(row(peer).data, row(peer).size_in_bytes(), peer, on,
                              stream.native_handle());
    });
  });
}

void transpose_rows(NcclGroup& group, ConstTensorView in, TensorView out, const RowCut& cut,
                    Stream& stream) {
  if (in.count == 0) return;
  const std::int64_t own = cut.length(group.rank());
  const bool direct = group.in_is_registered() == group.out_is_registered();
  std::byte* const work =
      group.work(direct ? 0 : work_bytes(in, cut), group.in_is_registered(), stream);
  const TensorView received{direct ? out.data : work, out.count, out.dtype, out.device};
  exchange_rows(group, in, cut, stream, [&](int r) { return received.slice(r * own, own).data; });
  if (!direct) copy_bytes(out.data, received.data, out.size_in_bytes(), stream);
  const ConstTensorView kept = in.slice(cut.begin(group.rank()), own);
  copy_bytes(out.slice(group.rank() * own, own).data, kept.data, kept.size_in_bytes(), stream);
}

void broadcast_bytes(NcclGroup& group, TensorView data, int root, Stream& stream) {
  if (data.count == 0) return;
  group.send_group([&](NcclHandle on) {
    group.library().broadcast(data.data, data.size_in_bytes(), root, on, stream.native_handle());
  });
}

void meet(NcclGroup& group, Stream& stream) {
  std::byte* const words = group.work(static_cast<std::size_t>(group.size()), false, stream);
  group.send_group([&](NcclHandle on) {
    group.library().all_gather(words + group.rank(), words, 1, on, stream.native_handle());
  });
}

}  // namespace hsdp::comm
