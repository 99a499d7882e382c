// Reduce-scatter, and all-reduce as reduce-scatter and all-gather in one, through channels.
//
// Rank r's slice is cut into tiles of one message. By tile index, the stream from rank a to rank b
// holds a's row of b's slice and, kLag tiles later, the totals of a's own slice. Both ends know
// that order. It cannot deadlock: every step waits only for steps of smaller tiles.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hsdp/comm/host/host_group.h"
#include "hsdp/comm/host/reduce_plan.h"

namespace hsdp::comm {

class PipedReduce {
 public:
  PipedReduce(HostGroup& group, const ReduceScatter& args);
  PipedReduce(HostGroup& group, const AllReduce& args);

  // Returns when the collective is complete on this rank.
  void run();

 private:
  static constexpr std::int64_t kLag = 2;
  static constexpr std::int64_t kWindow = 4;  // encoded totals kept until every peer has them

  struct Peer {
    std::int64_t tiles = 0;  // in that rank's slice: rows to send, totals to receive
    std::int64_t rows_sent = 0;
    std::int64_t totals_sent = 0;  // from this rank's slice
    std::int64_t totals_received = 0;
  };
  struct Tile {
    std::int64_t begin = 0;  // element of the whole buffer
    std::int64_t count = 0;
    std::size_t wire_bytes = 0;
  };

  void plan();
  [[nodiscard]] Tile tile(int rank, std::int64_t index) const;
  [[nodiscard]] const std::byte* row_at(std::int64_t element) const;
  [[nodiscard]] std::byte* window_slot(std::int64_t index);

  void encode(const Tile& tile, std::byte* place) const;
  bool step();
  bool send_row(int rank);
  bool send_total(int rank);
  bool receive_total(int rank);
  bool sum_next();
  void sum_tile(const Tile& tile);
  void decode(const Tile& tile, const std::byte* message);
  [[nodiscard]] std::byte* result_at(const Tile& tile) const;
  void note_nonfinite(const Tile& tile, const std::byte* place);
  [[nodiscard]] bool rows_have_come(const Tile& tile);
  [[nodiscard]] bool window_is_full() const;
  [[nodiscard]] bool sends_total_next(int rank) const;
  [[nodiscard]] bool receives_total_next(int rank) const;
  [[nodiscard]] std::int64_t own_tiles() const {
    return peers_[static_cast<std::size_t>(group_.rank())].tiles;
  }
  [[nodiscard]] bool encodes() const { return wire_ != dtype_; }
  [[nodiscard]] bool complete();

  HostGroup& group_;
  const std::byte* in_;
  std::byte* out_;  // first element of this rank's results
  Dtype dtype_;     // of the rows in memory
  Dtype wire_;
  kernels::SumSpec spec_;
  const AllReduce* gather_ = nullptr;  // null: a reduce-scatter
  bool accumulate_ = false;
  std::atomic<std::uint32_t>* nonfinite_;
  std::vector<ElementRun> slices_;
  std::vector<Peer> peers_;
  std::vector<const void*> rows_;
  std::unique_ptr<std::byte[]> staging_;  // this rank's encoded row, then encoded totals
  std::int64_t tile_elements_ = 0;
  std::int64_t summed_ = 0;
  int waits_for_ = 0;
};

}  // namespace hsdp::comm
