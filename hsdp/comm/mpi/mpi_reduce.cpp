#include "hsdp/comm/mpi/mpi_reduce.h"

#include <algorithm>

#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::comm {
namespace {

// Windows are long enough for MPI's large messages, while scratch for all ranks stays small.
constexpr std::size_t kScratchBytes = std::size_t{16} << 20;
constexpr std::size_t kLongestWindowBytes = std::size_t{512} << 10;
constexpr std::size_t kShortestWindowBytes = std::size_t{16} << 10;
static_assert(kLongestWindowBytes <= MpiTransfers::kPieceBytes);

std::size_t window_bytes(int size) {
  return std::clamp(kScratchBytes / static_cast<std::size_t>(size), kShortestWindowBytes,
                    kLongestWindowBytes);
}

}  // namespace

MpiReduce::MpiReduce(MpiGroup& group, const ReduceScatter& args)
    : group_(group),
      in_(static_cast<const std::byte*>(args.in.data)),
      out_(static_cast<std::byte*>(args.out.data)),
      out_begin_(args.cut->begin(group.rank())),
      dtype_(args.in.dtype),
      wire_(args.in.dtype),
      spec_(sum_spec(args)),
      accumulate_(args.accumulate),
      nonfinite_(args.nonfinite),
      slices_(slices_of(args, group.size())) {
  plan();
}

MpiReduce::MpiReduce(MpiGroup& group, const AllReduce& args)
    : group_(group),
      in_(static_cast<const std::byte*>(args.data.data)),
      out_(static_cast<std::byte*>(args.data.data)),
      out_begin_(0),
      dtype_(args.data.dtype),
      wire_(wire_dtype(args)),
      spec_(rounds_on_wire(args) ? wire_sum_spec(args) : sum_spec(args)),
      gather_(&args),
      nonfinite_(args.nonfinite),
      slices_(slices_of(args, group.size())) {
  plan();
}

void MpiReduce::plan() {
  std::int64_t longest = 0;
  for (const ElementRun& slice : slices_) longest = std::max(longest, slice.length);
  const auto most = static_cast<std::int64_t>(window_bytes(group_.size()) / size_bytes(wire_));
  window_elements_ = std::min(longest, most);
  if (longest > 0) turn_count_ = (longest + window_elements_ - 1) / window_elements_;
  rows_.resize(slices_.size());
}

void MpiReduce::open_turns() {
  const std::size_t size =
      slices_.size() * static_cast<std::size_t>(window_elements_) * size_bytes(wire_);
  turns_ = std::vector<Turn>(static_cast<std::size_t>(std::min<std::int64_t>(turn_count_, 2)));
  const auto open = [&](std::optional<MpiTransfers>& transfers) {
    transfers.emplace(group_.world()->link, group_.tag());
  };
  std::size_t next = 0;
  for (Turn& turn : turns_) {
    turn.rows = group_.scratch(next++, size);
    open(turn.row_transfers);
    turn.row_transfers->keep(turn.rows);
    if (gather_ != nullptr) open(turn.total_transfers);
    if (!encodes()) continue;
    turn.sent = group_.scratch(next++, size);
    turn.totals = group_.scratch(next++, size);
    turn.row_transfers->keep(turn.sent);
    turn.total_transfers->keep(turn.totals);
  }
}

ElementRun MpiReduce::window(int rank, std::int64_t t) const {
  const ElementRun& slice = slices_[static_cast<std::size_t>(rank)];
  const std::int64_t skip = std::min(slice.length, t * window_elements_);
  return {slice.begin + skip, std::min(window_elements_, slice.length - skip)};
}

std::byte* MpiReduce::place(const Bytes& bytes, int rank) const {
  return bytes.get() + static_cast<std::size_t>(rank) * static_cast<std::size_t>(window_elements_) *
                           size_bytes(wire_);
}

std::size_t MpiReduce::wire_bytes(const ElementRun& window) const {
  return static_cast<std::size_t>(window.length) * size_bytes(wire_);
}

const std::byte* MpiReduce::row_at(const ElementRun& window) const {
  return in_ + static_cast<std::size_t>(window.begin) * size_bytes(dtype_);
}

std::byte* MpiReduce::result_at(const ElementRun& window) const {
  const Dtype dtype = gather_ != nullptr ? dtype_ : spec_.out_dtype;
  return out_ + static_cast<std::size_t>(window.begin - out_begin_) * size_bytes(dtype);
}

// Only an all-reduce rounds for the wire.
void MpiReduce::encode(const ElementRun& window, std::byte* place) const {
  kernels::scale_and_cast({.in = row_at(window),
                           .in_dtype = dtype_,
                           .out = place,
                           .out_dtype = wire_,
                           .count = window.length,
                           .exponent = -gather_->send_exponent});
}

void MpiReduce::decode(const ElementRun& window, const std::byte* total) const {
  kernels::scale_and_cast({.in = total,
                           .in_dtype = wire_,
                           .out = result_at(window),
                           .out_dtype = dtype_,
                           .count = window.length,
                           .exponent = gather_->total_exponent,
                           .divisor = gather_->divisor,
                           .nonfinite = nonfinite_});
}

void MpiReduce::send_rows(std::int64_t t) {
  Turn& now = turn(t);
  const ElementRun own = window(group_.rank(), t);
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = (group_.rank() + group_.size() - distance) % group_.size();
    now.row_transfers->receive(group_.peer(from), place(now.rows, from), wire_bytes(own));
  }
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int to = (group_.rank() + distance) % group_.size();
    const ElementRun theirs = window(to, t);
    if (theirs.length == 0) continue;
    const std::byte* row = row_at(theirs);
    if (encodes()) {
      encode(theirs, place(now.sent, to));
      row = place(now.sent, to);
    }
    now.row_transfers->send(group_.peer(to), row, wire_bytes(theirs));
  }
}

// If totals are rounded, decodes this rank's from the bytes that peers receive.
void MpiReduce::sum(std::int64_t t) {
  Turn& now = turn(t);
  const ElementRun own = window(group_.rank(), t);
  if (own.length == 0) return;
  for (int r = 0; r < group_.size(); ++r) {
    rows_[static_cast<std::size_t>(r)] = place(now.rows, r);
  }
  void* total = result_at(own);
  if (encodes()) {
    encode(own, place(now.rows, group_.rank()));
    total = place(now.totals, group_.rank());
  } else {
    rows_[static_cast<std::size_t>(group_.rank())] = row_at(own);
  }
  kernels::sum_rows({.spec = spec_,
                     .rows = rows_,
                     .add = accumulate_ ? result_at(own) : nullptr,
                     .outs = {&total, 1},
                     .count = own.length,
                     .nonfinite = encodes() ? nullptr : nonfinite_});
  if (encodes()) decode(own, place(now.totals, group_.rank()));
}

void MpiReduce::send_totals(std::int64_t t) {
  Turn& now = turn(t);
  const ElementRun own = window(group_.rank(), t);
  const std::byte* const total = encodes() ? place(now.totals, group_.rank()) : result_at(own);
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = (group_.rank() + group_.size() - distance) % group_.size();
    const ElementRun theirs = window(from, t);
    std::byte* const to = encodes() ? place(now.totals, from) : result_at(theirs);
    now.total_transfers->receive(group_.peer(from), to, wire_bytes(theirs));
  }
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int to = (group_.rank() + distance) % group_.size();
    now.total_transfers->send(group_.peer(to), total, wire_bytes(own));
  }
}

void MpiReduce::take_totals(std::int64_t t) {
  Turn& now = turn(t);
  group_.wait(*now.total_transfers);
  for (int r = 0; r < group_.size(); ++r) {
    const ElementRun theirs = window(r, t);
    if (r == group_.rank() || theirs.length == 0) continue;
    if (encodes()) {
      decode(theirs, place(now.totals, r));
    } else if (nonfinite_ != nullptr &&
               kernels::has_nonfinite({result_at(theirs), theirs.length, dtype_})) {
      nonfinite_->store(1);
    }
  }
}

void MpiReduce::run() {
  if (turn_count_ == 0) return;
  open_turns();
  send_rows(0);
  for (std::int64_t t = 0; t < turn_count_; ++t) {
    if (t + 1 < turn_count_) send_rows(t + 1);
    group_.wait(*turn(t).row_transfers);
    sum(t);
    if (gather_ == nullptr) continue;
    send_totals(t);
    if (t > 0) take_totals(t - 1);
  }
  if (gather_ != nullptr) take_totals(turn_count_ - 1);
}

}  // namespace hsdp::comm
