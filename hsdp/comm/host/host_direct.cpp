#include "hsdp/comm/host/host_direct.h"

#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/error.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp::comm {
namespace {

std::byte* address(HostGroup& group, std::span<const HostCall> calls, int rank) {
  const HostCall& call = calls[static_cast<std::size_t>(rank)];
  if (call.part == kNoBytes) return nullptr;
  std::byte* const place = group.memory().peer(group.members()[static_cast<std::size_t>(rank)],
                                               {call.part, call.offset});
  if (place == nullptr) {
    throw Error("host memory: rank " + std::to_string(rank) + " of the group posted part " +
                std::to_string(call.part) + ", which is not mapped here; keep the memory of an " +
                "allocation until its last collective returned");
  }
  return place;
}

// The local addresses of all ranks' posted memory; this rank's is `own`.
std::vector<std::byte*> addresses(HostGroup& group, std::span<const HostCall> calls,
                                  const void* own) {
  std::vector<std::byte*> places(calls.size());
  for (int r = 0; r < group.size(); ++r) {
    places[static_cast<std::size_t>(r)] =
        r == group.rank() ? static_cast<std::byte*>(const_cast<void*>(own))  // NOLINT: rows only
                          : address(group, calls, r);
  }
  return places;
}

void copy_bytes(void* to, const void* from, std::size_t size) {
  if (to != from && size > 0) std::memcpy(to, from, size);
}

}  // namespace

void direct_reduce_scatter(HostGroup& group, std::span<const HostCall> calls,
                           const ReduceScatter& args) {
  const std::int64_t begin = args.cut->begin(group.rank());
  const std::size_t skip = static_cast<std::size_t>(begin) * size_bytes(args.in.dtype);
  std::vector<const void*> rows;
  if (args.in.count > 0) {
    for (const std::byte* place : addresses(group, calls, args.in.data)) {
      rows.push_back(place + skip);
    }
  }
  void* const out = args.out.data;
  if (args.out.count > 0)
    kernels::sum_rows({.spec = sum_spec(args),
                       .rows = rows,
                       .add = args.accumulate ? args.out.data : nullptr,
                       .outs = {&out, 1},
                       .count = args.out.count,
                       .nonfinite = args.nonfinite,
                       .streaming_stores = args.out.size_in_bytes() >= kStreamingBytes});
  group.finish(false);
  group.wait_finished();
}

void direct_all_reduce(HostGroup& group, std::span<const HostCall> calls, const AllReduce& args) {
  const ElementRun slice = all_reduce_slice(args.data.count, group.size(), group.rank());
  const std::size_t skip = static_cast<std::size_t>(slice.begin) * size_bytes(args.data.dtype);
  std::vector<const void*> rows;
  std::vector<void*> outs;
  bool wants_nonfinite = false;
  if (slice.length > 0) {
    for (std::byte* place : addresses(group, calls, args.data.data)) {
      rows.push_back(place + skip);
      outs.push_back(place + skip);
    }
  }
  for (const HostCall& call : calls) wants_nonfinite |= call.wants_nonfinite != 0;
  std::atomic<std::uint32_t> nonfinite{0};
  if (slice.length > 0)
    kernels::sum_rows({.spec = sum_spec(args),
                       .rows = rows,
                       .outs = outs,
                       .count = slice.length,
                       .nonfinite = wants_nonfinite ? &nonfinite : nullptr});
  group.finish(nonfinite.load() != 0);
  const bool any = group.wait_finished();
  if (any && args.nonfinite != nullptr) args.nonfinite->store(1);
}

void direct_all_gather(HostGroup& group, std::span<const HostCall> calls, ConstTensorView in,
                       TensorView out, const RowCut& cut) {
  const auto places = addresses(group, calls, in.data);
  for (int step = 0; step < group.size(); ++step) {
    const int r = (group.rank() + step) % group.size();
    const TensorView row = out.slice(cut.begin(r), cut.length(r));
    copy_bytes(row.data, places[static_cast<std::size_t>(r)], row.size_in_bytes());
  }
  group.finish(false);
  group.wait_finished();
}

void direct_all_to_all(HostGroup& group, std::span<const HostCall> calls, ConstTensorView in,
                       TensorView out, const RowCut& cut) {
  const auto places = addresses(group, calls, in.data);
  const std::int64_t own = cut.length(group.rank());
  const auto offset = in.slice(0, cut.begin(group.rank())).size_in_bytes();
  for (int step = 0; step < group.size(); ++step) {
    const int r = (group.rank() + step) % group.size();
    const TensorView row = out.slice(r * own, own);
    copy_bytes(row.data, places[static_cast<std::size_t>(r)] + offset, row.size_in_bytes());
  }
  group.finish(false);
  group.wait_finished();
}

void direct_broadcast(HostGroup& group, std::span<const HostCall> calls, TensorView data,
                      int root) {
  if (group.rank() != root)
    copy_bytes(data.data, address(group, calls, root), data.size_in_bytes());
  group.finish(false);
  if (group.rank() == root) group.wait_finished();
}

}  // namespace hsdp::comm
