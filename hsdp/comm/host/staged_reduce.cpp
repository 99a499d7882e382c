#include "hsdp/comm/host/staged_reduce.h"

#include <array>
#include <cstring>
#include <span>

#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::comm {

StagedReduce::StagedReduce(HostGroup& group, const ReduceScatter& args)
    : group_(group),
      in_(static_cast<const std::byte*>(args.in.data)),
      out_(static_cast<std::byte*>(args.out.data)),
      out_begin_(args.cut->begin(group.rank())),
      dtype_(args.in.dtype),
      wire_(args.in.dtype),
      spec_(sum_spec(args)),
      accumulate_(args.accumulate),
      streaming_stores_(args.out.size_in_bytes() >= kStreamingBytes),
      nonfinite_(args.nonfinite),
      plan_(slices_of(args, group.size()), size_bytes(wire_)),
      rows_(static_cast<std::size_t>(group.size())) {}

StagedReduce::StagedReduce(HostGroup& group, const AllReduce& args)
    : group_(group),
      in_(static_cast<const std::byte*>(args.data.data)),
      out_(static_cast<std::byte*>(args.data.data)),
      out_begin_(0),
      dtype_(args.data.dtype),
      wire_(wire_dtype(args)),
      spec_(rounds_on_wire(args) ? wire_sum_spec(args) : sum_spec(args)),
      gather_(&args),
      nonfinite_(args.nonfinite),
      plan_(slices_of(args, group.size()), size_bytes(wire_)),
      rows_(static_cast<std::size_t>(group.size())) {}

std::byte* StagedReduce::place(int rank, std::int64_t tile, const Window& window) const {
  return group_.scratch(rank, tile) + window.offset;
}

const std::byte* StagedReduce::row_at(const Window& window) const {
  return in_ + static_cast<std::size_t>(window.begin) * size_bytes(dtype_);
}

std::byte* StagedReduce::result_at(const Window& window) const {
  const Dtype dtype = gather_ != nullptr ? dtype_ : spec_.out_dtype;
  return out_ + static_cast<std::size_t>(window.begin - out_begin_) * size_bytes(dtype);
}

// Only an all-reduce rounds for the wire.
void StagedReduce::encode(const Window& window, std::byte* place) const {
  if (gather_ == nullptr) return;
  kernels::scale_and_cast({.in = row_at(window),
                           .in_dtype = dtype_,
                           .out = place,
                           .out_dtype = wire_,
                           .count = window.count,
                           .exponent = -gather_->send_exponent});
}

void StagedReduce::decode(const Window& window, const std::byte* total) const {
  if (gather_ == nullptr) return;
  kernels::scale_and_cast({.in = total,
                           .in_dtype = wire_,
                           .out = result_at(window),
                           .out_dtype = dtype_,
                           .count = window.count,
                           .exponent = gather_->total_exponent,
                           .divisor = gather_->divisor,
                           .nonfinite = nonfinite_});
}

void StagedReduce::stage(std::int64_t tile) {
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int r = (group_.rank() + distance) % group_.size();
    const Window window = plan_.window(r, tile);
    if (window.count == 0) continue;
    std::byte* const row = place(group_.rank(), tile, window);
    if (encodes()) {
      encode(window, row);
    } else {
      std::memcpy(row, row_at(window), static_cast<std::size_t>(window.count) * size_bytes(wire_));
    }
  }
}

// If totals are rounded for the wire, decodes this rank's results from the bytes that peers read.
void StagedReduce::sum(std::int64_t tile) {
  const Window window = plan_.window(group_.rank(), tile);
  if (window.count == 0) return;
  for (int r = 0; r < group_.size(); ++r) {
    rows_[static_cast<std::size_t>(r)] = place(r, tile, window);
  }
  std::byte* const total = place(group_.rank(), tile, window);
  std::array<void*, 2> outs{result_at(window), total};
  std::size_t out_count = gather_ != nullptr ? 2 : 1;
  if (encodes()) {
    encode(window, total);
    outs[0] = total;
    out_count = 1;
  } else {
    rows_[static_cast<std::size_t>(group_.rank())] = row_at(window);
  }
  kernels::sum_rows({.spec = spec_,
                     .rows = rows_,
                     .add = accumulate_ ? result_at(window) : nullptr,
                     .outs = std::span(outs).first(out_count),
                     .count = window.count,
                     .nonfinite = encodes() ? nullptr : &own_nonfinite_,
                     .streaming_stores = streaming_stores_});
  if (encodes()) decode(window, total);
}

void StagedReduce::take_totals(std::int64_t tile) {
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int r = (group_.rank() + distance) % group_.size();
    const Window window = plan_.window(r, tile);
    if (window.count == 0) continue;
    const std::byte* const total = place(r, tile, window);
    if (encodes()) {
      decode(window, total);
    } else {
      std::memcpy(result_at(window), total,
                  static_cast<std::size_t>(window.count) * size_bytes(wire_));
    }
  }
}

void StagedReduce::complete() {
  bool any_nonfinite = own_nonfinite_.load() != 0;
  if (gather_ != nullptr) {
    group_.finish(any_nonfinite);
    any_nonfinite = group_.wait_finished();
    take_totals(plan_.tiles() - 1);
  }
  if (any_nonfinite && nonfinite_ != nullptr) nonfinite_->store(1);
}

void StagedReduce::run() {
  if (plan_.tiles() == 0) return;
  stage(0);
  for (std::int64_t tile = 0; tile < plan_.tiles(); ++tile) {
    group_.arrive();
    group_.wait_arrived();
    sum(tile);
    if (gather_ != nullptr && tile > 0) take_totals(tile - 1);
    if (tile + 1 < plan_.tiles()) stage(tile + 1);
  }
  complete();
}

}  // namespace hsdp::comm
