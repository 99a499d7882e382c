#include "hsdp/reducer/row_sums.h"

#include <exception>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"

namespace hsdp::reducer {
namespace {

StridedView flat(const TensorView& view) {
  return {view.data, view.dtype, view.device, {view.count}, {}};
}

// out = kept + row in fp32; either may be missing.
void sum_row(const TensorView& kept, const TensorView& row, const TensorView& out,
             const Stream& stream) {
  if (kept.data == nullptr && row.data == out.data && row.data != nullptr) return;
  const StridedView first = flat(kept.data != nullptr ? kept : row);
  kernels::CastAndPack args;
  if (first.data != nullptr) args.gradient = &first;
  if (kept.data != nullptr && row.data != nullptr) {
    args.add = row.data;
    args.add_dtype = row.dtype;
  }
  args.count = out.count;
  args.out = out.data;
  kernels::cast_and_pack(args, stream);
}

// False if the device cannot tell.
bool is_complete(const Event& event) {
  try {
    return event.complete();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

RowSums::RowSums(const Groups& ranks, std::size_t group_count, Outcome& outcome)
    : ranks_(ranks), outcome_(outcome), sums_(group_count), nonfinite_(make_flag(ranks.device)) {}

void RowSums::keep(std::size_t group, const TensorView& row, bool adds, Stream stream) {
  if (ranks_.on_host()) stream.synchronize();
  Sum& sum = sums_[group];
  const auto bytes = static_cast<std::size_t>(row.count) * sizeof(float);
  if (sum.memory.size() != bytes) sum.memory = Buffer(ranks_.device, bytes);
  const TensorView kept = sum.memory.view(Dtype::kF32);
  stream.wait(sum.written);
  sum_row(adds ? kept : TensorView{}, row, kept, stream);
  sum.written = stream.record();
}

void RowSums::add_up(std::size_t group, const TensorView& row, bool adds, const TensorView& total,
                     Stream& stream) {
  if (ranks_.on_host()) stream.synchronize();
  Sum& sum = sums_[group];
  stream.wait(totals_);
  stream.wait(sum.written);
  sum_row(adds ? sum.memory.view(Dtype::kF32) : TensorView{}, row, total, stream);
}

void RowSums::follow(const Event& hop, Stream& stream) {
  if (ranks_.on_host() || hop.complete()) {
    hop.wait();
  } else {
    late_hops_.push_back(hop);
  }
  stream.wait(hop);
}

void RowSums::close_total(std::size_t group, Stream& stream) {
  totals_ = sums_[group].written = stream.record();
  if (totals_.complete()) totals_.wait();  // throws what went wrong
}

void RowSums::wait() {
  if (!outcome_.failed()) drain();
  outcome_.rethrow_failure("replica hop");
}

void RowSums::drain() noexcept {
  std::vector<Event> all = std::exchange(late_hops_, {});
  all.push_back(totals_);
  for (const Sum& sum : sums_) all.push_back(sum.written);
  std::exception_ptr error;
  for (const Event& event : all) {
    try {
      ranks_.world.wait(event);
    } catch (...) {
      if (!error) error = std::current_exception();
      if (!is_complete(event)) break;  // the GPU hangs: nor will the others
    }
  }
  if (error) outcome_.fail(std::move(error));
}

bool RowSums::take_nonfinite() {
  wait();
  return nonfinite_->exchange(0) != 0;
}

std::int64_t RowSums::bytes(std::size_t group) const {
  return static_cast<std::int64_t>(sums_[group].memory.size());
}

}  // namespace hsdp::reducer
