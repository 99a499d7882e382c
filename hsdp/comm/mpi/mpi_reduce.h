// Reduce-scatter and all-reduce over MPI: an all-to-all of rows, our own sum in ascending rank and,
// for an all-reduce, an all-gather of the totals, window by window.
//
// Every rank's slice is cut into windows; turn t processes the t-th window of every slice. The rows
// of turn t + 1 travel while turn t is summed, and the totals of turn t while turn t + 1 is summed.
// Scratch holds two windows of every rank, whatever the size of the message.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/comm/mpi/mpi_group.h"

namespace hsdp::comm {

class MpiReduce {
 public:
  // Borrows `args`.
  MpiReduce(MpiGroup& group, const ReduceScatter& args);
  MpiReduce(MpiGroup& group, const AllReduce& args);

  // Call it after group.agree(). Returns when the collective is complete on this rank.
  void run();

 private:
  using Bytes = std::shared_ptr<std::byte[]>;
  struct Turn {
    Bytes rows;    // by rank: rows received for this rank's window, in the wire dtype
    Bytes sent;    // by rank: rows rounded for their windows
    Bytes totals;  // by rank, if totals are rounded
    std::optional<MpiTransfers> row_transfers;
    std::optional<MpiTransfers> total_transfers;
  };

  void plan();
  void open_turns();
  void send_rows(std::int64_t t);
  void sum(std::int64_t t);
  void send_totals(std::int64_t t);
  void take_totals(std::int64_t t);
  void encode(const ElementRun& window, std::byte* place) const;
  void decode(const ElementRun& window, const std::byte* total) const;

  [[nodiscard]] ElementRun window(int rank, std::int64_t t) const;
  [[nodiscard]] Turn& turn(std::int64_t t) { return turns_[static_cast<std::size_t>(t % 2)]; }
  [[nodiscard]] std::byte* place(const Bytes& bytes, int rank) const;
  [[nodiscard]] std::size_t wire_bytes(const ElementRun& window) const;
  [[nodiscard]] const std::byte* row_at(const ElementRun& window) const;
  [[nodiscard]] std::byte* result_at(const ElementRun& window) const;
  [[nodiscard]] bool encodes() const { return wire_ != dtype_; }

  MpiGroup& group_;
  const std::byte* in_;
  std::byte* out_;
  std::int64_t out_begin_;  // the element of the whole message at out_
  Dtype dtype_;             // of the rows in memory
  Dtype wire_;
  kernels::SumSpec spec_;
  const AllReduce* gather_ = nullptr;  // null: a reduce-scatter
  bool accumulate_ = false;
  std::atomic<std::uint32_t>* nonfinite_;
  std::vector<ElementRun> slices_;
  std::int64_t window_elements_ = 0;
  std::int64_t turn_count_ = 0;
  std::vector<Turn> turns_;
  std::vector<const void*> rows_;
};

}  // namespace hsdp::comm
