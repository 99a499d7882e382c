#include "hsdp/comm/host/piped_reduce.h"

#include <algorithm>

#include "hsdp/comm/host/tcp_channel.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::comm {
namespace {

// The order in a stream: total j follows row j + lag, or the last row.
bool total_is_next(std::int64_t totals, std::int64_t totals_done, std::int64_t rows,
                   std::int64_t rows_done, std::int64_t lag) {
  return totals_done < totals && rows_done >= std::min(totals_done + lag + 1, rows);
}

}  // namespace

PipedReduce::PipedReduce(HostGroup& group, const ReduceScatter& args)
    : group_(group),
      in_(static_cast<const std::byte*>(args.in.data)),
      out_(static_cast<std::byte*>(args.out.data)),
      dtype_(args.in.dtype),
      wire_(args.in.dtype),
      spec_(sum_spec(args)),
      accumulate_(args.accumulate),
      nonfinite_(args.nonfinite),
      slices_(slices_of(args, group.size())) {
  plan();
}

PipedReduce::PipedReduce(HostGroup& group, const AllReduce& args)
    : group_(group),
      in_(static_cast<const std::byte*>(args.data.data)),
      out_(nullptr),
      dtype_(args.data.dtype),
      wire_(wire_dtype(args)),
      spec_(rounds_on_wire(args) ? wire_sum_spec(args) : sum_spec(args)),
      gather_(&args),
      nonfinite_(args.nonfinite),
      slices_(slices_of(args, group.size())) {
  const ElementRun own = slices_[static_cast<std::size_t>(group.rank())];
  out_ = static_cast<std::byte*>(args.data.slice(own.begin, own.length).data);
  plan();
  if (!encodes()) return;
  static_assert(1 + kWindow <= kStagedMessages);
  staging_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(1 + kWindow) *
                                                         group.message_bytes());
}

void PipedReduce::plan() {
  tile_elements_ = static_cast<std::int64_t>(group_.message_bytes() / size_bytes(wire_));
  peers_.resize(slices_.size());
  rows_.resize(slices_.size());
  for (std::size_t r = 0; r < slices_.size(); ++r) {
    peers_[r].tiles = (slices_[r].length + tile_elements_ - 1) / tile_elements_;
  }
}

PipedReduce::Tile PipedReduce::tile(int rank, std::int64_t index) const {
  const ElementRun& slice = slices_[static_cast<std::size_t>(rank)];
  const std::int64_t skip = index * tile_elements_;
  const std::int64_t count = std::min(tile_elements_, slice.length - skip);
  return {slice.begin + skip, count, static_cast<std::size_t>(count) * size_bytes(wire_)};
}

const std::byte* PipedReduce::row_at(std::int64_t element) const {
  return in_ + static_cast<std::size_t>(element) * size_bytes(dtype_);
}

std::byte* PipedReduce::window_slot(std::int64_t index) {
  return staging_.get() + static_cast<std::size_t>(1 + index % kWindow) * group_.message_bytes();
}

bool PipedReduce::sends_total_next(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  return gather_ != nullptr &&
         total_is_next(own_tiles(), peer.totals_sent, peer.tiles, peer.rows_sent, kLag);
}

bool PipedReduce::receives_total_next(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  return gather_ != nullptr &&
         total_is_next(peer.tiles, peer.totals_received, own_tiles(), summed_, kLag);
}

bool PipedReduce::send_row(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.rows_sent == peer.tiles) return false;
  const Tile next = tile(rank, peer.rows_sent);
  Channel& channel = group_.channel(rank);
  if (!encodes()) {
    if (!channel.send(row_at(next.begin), next.wire_bytes)) return false;
  } else {
    std::byte* const place = channel.reserve();
    if (place == nullptr) return false;
    encode(next, place);
    channel.commit(next.wire_bytes);
  }
  ++peer.rows_sent;
  return true;
}

bool PipedReduce::send_total(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.totals_sent == summed_) return false;
  const Tile next = tile(group_.rank(), peer.totals_sent);
  const std::byte* const total = encodes() ? window_slot(peer.totals_sent) : row_at(next.begin);
  if (!group_.channel(rank).send(total, next.wire_bytes)) return false;
  ++peer.totals_sent;
  return true;
}

bool PipedReduce::receive_total(int rank) {
  if (!receives_total_next(rank)) return false;
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const Tile next = tile(rank, peer.totals_received);
  Channel& channel = group_.channel(rank);
  if (!encodes()) {
    std::byte* const place = result_at(next);
    if (!channel.receive(place, next.wire_bytes)) return false;
    note_nonfinite(next, place);
  } else {
    const std::byte* const message = channel.front(next.wire_bytes);
    if (message == nullptr) return false;
    decode(next, message);
    channel.pop();
  }
  ++peer.totals_received;
  return true;
}

void PipedReduce::encode(const Tile& tile, std::byte* place) const {
  kernels::scale_and_cast({.in = row_at(tile.begin),
                           .in_dtype = dtype_,
                           .out = place,
                           .out_dtype = wire_,
                           .count = tile.count,
                           .exponent = -gather_->send_exponent});
}

std::byte* PipedReduce::result_at(const Tile& tile) const {
  return static_cast<std::byte*>(gather_->data.slice(tile.begin, tile.count).data);
}

void PipedReduce::note_nonfinite(const Tile& tile, const std::byte* place) {
  if (nonfinite_ == nullptr) return;
  if (kernels::has_nonfinite({place, tile.count, dtype_})) nonfinite_->store(1);
}

void PipedReduce::decode(const Tile& tile, const std::byte* message) {
  kernels::scale_and_cast({.in = message,
                           .in_dtype = wire_,
                           .out = result_at(tile),
                           .out_dtype = dtype_,
                           .count = tile.count,
                           .exponent = gather_->total_exponent,
                           .divisor = gather_->divisor,
                           .nonfinite = nonfinite_});
}

bool PipedReduce::window_is_full() const {
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const bool peer = static_cast<int>(r) != group_.rank();
    if (peer && summed_ - peers_[r].totals_sent >= kWindow) return true;
  }
  return false;
}

bool PipedReduce::rows_have_come(const Tile& next) {
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank()) continue;
    const std::byte* const row =
        receives_total_next(r) ? nullptr : group_.channel(r).front(next.wire_bytes);
    if (row == nullptr) {
      waits_for_ = r;
      return false;
    }
    rows_[static_cast<std::size_t>(r)] = row;
  }
  return true;
}

bool PipedReduce::sum_next() {
  if (summed_ == own_tiles() || (encodes() && window_is_full())) return false;
  const Tile next = tile(group_.rank(), summed_);
  if (!rows_have_come(next)) return false;
  sum_tile(next);
  for (int r = 0; r < group_.size(); ++r) {
    if (r != group_.rank()) group_.channel(r).pop();
  }
  ++summed_;
  return true;
}

// The sum goes into this rank's results and is sent from there. With rounding, it is sent from the
// window and decoded from there, as on the peers.
void PipedReduce::sum_tile(const Tile& next) {
  const auto skip = static_cast<std::size_t>(summed_ * tile_elements_);
  std::byte* const result = out_ + skip * size_bytes(spec_.out_dtype);
  void* const total = encodes() ? window_slot(summed_) : result;
  const void*& own_row = rows_[static_cast<std::size_t>(group_.rank())];
  own_row = row_at(next.begin);
  if (encodes()) {
    encode(next, staging_.get());
    own_row = staging_.get();
  }
  kernels::sum_rows({.spec = spec_,
                     .rows = rows_,
                     .add = accumulate_ ? result : nullptr,
                     .outs = {&total, 1},
                     .count = next.count,
                     .nonfinite = encodes() ? nullptr : nonfinite_});
  if (encodes()) decode(next, window_slot(summed_));
}

bool PipedReduce::step() {
  bool moved = false;
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int rank = (group_.rank() + distance) % group_.size();
    moved |= receive_total(rank);
    moved |= sends_total_next(rank) ? send_total(rank) : send_row(rank);
  }
  moved |= sum_next();
  return moved;
}

bool PipedReduce::complete() {
  if (summed_ < own_tiles()) return false;
  bool flushed = true;
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank()) continue;
    const Peer& peer = peers_[static_cast<std::size_t>(r)];
    const bool done = peer.rows_sent == peer.tiles &&
                      (gather_ == nullptr ||
                       (peer.totals_sent == own_tiles() && peer.totals_received == peer.tiles));
    if (!done) waits_for_ = r;
    flushed = flushed && done && group_.channel(r).flush();
  }
  return flushed;
}

void PipedReduce::run() {
  while (!complete()) {
    group_.wait([this] { return step() || complete(); }, [this] { return waits_for_; });
  }
}

}  // namespace hsdp::comm
