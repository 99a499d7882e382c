// What a reduction needs beside its arguments: where rows from the peers arrive, and what is sent
// in another dtype.
#pragma once

#include <cstddef>
#include <optional>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/nccl/nccl_group.h"
#include "hsdp/device/scratch.h"

namespace hsdp::comm {

// Rows, and parts of work memory, begin on such.
constexpr std::size_t kWorkAlignment = 256;
constexpr std::size_t work_size(std::size_t bytes) {
  return (bytes + kWorkAlignment - 1) / kWorkAlignment * kWorkAlignment;
}

// Rows at unequal distances that a kernel takes.
constexpr int kMostListedRows = 400;

[[nodiscard]] bool sums_natively(Reduction reduction, Dtype dtype);

// The sum that this rank makes of an all-reduce, and what its peers do.
[[nodiscard]] RowCut sum_cut(std::int64_t count, int size);

// Of the rank of a group of `size` that needs most: the same on all of them.
[[nodiscard]] std::size_t work_bytes(const ReduceScatter& args, int size);
[[nodiscard]] std::size_t work_bytes(const AllReduce& args, int size);
// Of an all-to-all whose memory is registered on one side only.
[[nodiscard]] std::size_t work_bytes(ConstTensorView in, const RowCut& cut);

// In a task of a stream, for one call: the group's own where that is large enough, else scratch.
// `registered`: what it exchanges rows with is, and then the group's must do.
class NcclWork {
 public:
  NcclWork(NcclGroup& group, std::size_t bytes, bool registered, Stream& stream)
      : data_(group.memory().take_work(bytes, registered, stream)) {
    if (data_ != nullptr || bytes == 0) return;
    scratch_.emplace(bytes, stream);
    data_ = scratch_->data();
  }
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::byte* data_;
  std::optional<Scratch> scratch_;
};

}  // namespace hsdp::comm
