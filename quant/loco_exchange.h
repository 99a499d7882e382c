// Sends a quantized bucket to the other replicas in windows. Each window passes through five
// stages, which overlap with those of other windows [Note: windows in flight].
//
//   encode    shard sums x factor + error -> a message with a row for each replica
//   scatter   all-to-all: every replica gets its row of all messages
//   sum       the rows in ascending replica + error -> this replica's row of the gathered message
//   gather    all-gather
//   decode    the whole message -> means, the same bits on every replica
//
// If each replica keeps its part of the total, there is no gather: decode sums the rows, in
// ascending replica, into the part.
//
// Used by one thread. The stages run on separate streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/event.h"
#include "hsdp/device/stream.h"
#include "hsdp/replica_hop.h"
#include "quant/error_state.h"
#include "quant/group_map.h"
#include "quant/quantize.h"

namespace hsdp::quant {

struct ExchangeFormats {
  GroupFormat scattered;
  GroupFormat gathered;
  bool gathers = true;  // false: each replica keeps its part
};

// A part of a bucket, cut at group boundaries, that is sent in one exchange.
struct LocoWindow {
  LocoWindow(std::vector<ParameterRange> runs, GroupMap map, const ExchangeFormats& formats,
             Device device);

  std::vector<ParameterRange> runs;
  GroupMap map;
  MessageLayout scattered;
  MessageLayout gathered;
  // On the device; on the host, the memory of the map and the layouts.
  Buffer tables;
  std::span<const GroupTile> tiles;
  const MessageRow* scattered_rows = nullptr;
  const MessageRow* gathered_rows = nullptr;

  [[nodiscard]] std::span<const GroupTile> own_tiles(int replica) const;
};

// Cuts a bucket's ranges into windows of about equal size, except for the last.
[[nodiscard]] std::vector<std::vector<ParameterRange>> cut_into_windows(
    std::span<const ParameterRange> ranges, int group_size, std::int64_t window_elements);
// The same for ranges in the rows of `parts`, in their order. Each window takes about equally much
// of each part, so that it goes to all replicas.
[[nodiscard]] std::vector<std::vector<ParameterRange>> cut_into_windows(
    std::span<const ParameterRange> ranges, int group_size, std::int64_t window_elements,
    const RowCut& parts);

// The sizes of messages in bytes.
struct ExchangeNeed {
  // The buffers of one window in flight, and the number of windows in flight.
  std::int64_t scattered = 0;
  std::int64_t received = 0;
  std::int64_t gathered = 0;
  std::size_t slots = 0;
  std::int64_t wire = 0;  // for all windows, both halves

  [[nodiscard]] std::int64_t staging() const {
    return static_cast<std::int64_t>(slots) * (scattered + received + gathered);
  }
};
[[nodiscard]] ExchangeNeed exchange_need(std::span<const LocoWindow> windows,
                                         const ExchangeFormats& formats, Device device);

class LocoExchange {
 public:
  LocoExchange(std::vector<LocoWindow> windows, const ExchangeFormats& formats, Device device,
               const MemoryCount& memory);

  [[nodiscard]] const std::vector<LocoWindow>& windows() const { return windows_; }
  [[nodiscard]] int replica() const { return scatter_.rank(); }

  void bind(Communicator scatter, Communicator gather);
  // Waits for work in flight; never throws.
  void finish() noexcept;

  struct Errors {
    ErrorStates::Step scattered;
    ErrorStates::Step gathered;
  };
  struct Arguments {
    HopBucket bucket;
    float beta = 0.0F;
    bool dithers = false;
    std::uint64_t seed = 0;
    std::uint32_t step = 0;
    std::uint32_t repeat = 0;                  // earlier reductions of the bucket in the step
    std::int64_t part_begin = 0;               // of bucket.part, in bucket.data
    TileFigures* scattered_figures = nullptr;  // of the window's tiles
    TileFigures* gathered_figures = nullptr;   // of the tiles that this replica owns

    [[nodiscard]] CallLabel label() const { return {bucket.bucket, bucket.planned}; }
    [[nodiscard]] Dither dither(std::uint32_t stream) const {
      return {seed, step, stream | repeat << 16U};
    }
  };
  // Enqueues a window whose shard sums are complete after `ready`.
  void reduce(std::size_t window, const Arguments& arguments, const Errors& errors,
              const Event& ready);
  // Completes when all windows enqueued so far are decoded.
  [[nodiscard]] Event decoded() { return decode_.record(); }
  // The streams that read and write scattered errors, and gathered ones.
  [[nodiscard]] const Stream& encode_stream() const { return encode_; }
  [[nodiscard]] const Stream& sum_stream() const { return sum_; }
  // Sums `args` without quantization, in order with the windows.
  [[nodiscard]] Event all_reduce(const AllReduce& args, const Event& ready);
  // The same into this replica's part. `plain` outlives the Event.
  [[nodiscard]] Event reduce_scatter(const PlainScatter& plain, const HopBucket& bucket,
                                     const Event& ready);

 private:
  struct Slot {
    Buffer scattered;
    Buffer received;
    Buffer gathered;
    Event free;
  };

  [[nodiscard]] int replicas() const { return scatter_.size(); }
  [[nodiscard]] Slot& next_slot();
  void encode_and_scatter(const LocoWindow& window, const Slot& slot, const Arguments& arguments,
                          const ErrorStates::Step& errors, const Event& ready);
  void sum_and_gather(const LocoWindow& window, const Slot& slot, const Arguments& arguments,
                      const ErrorStates::Step& errors);
  void sum_part(const LocoWindow& window, const Slot& slot, const Arguments& arguments);
  // This replica's rows of all messages.
  [[nodiscard]] ReceivedMessages received(const LocoWindow& window, const Slot& slot) const;

  std::vector<LocoWindow> windows_;
  ExchangeFormats formats_;
  Device device_;
  std::vector<Slot> slots_;
  std::size_t slot_ = 0;
  MemoryCount::Held held_;
  Communicator scatter_;
  Communicator gather_;
  Stream encode_ = Stream::inline_host();  // bind() replaces them with streams of the device
  Stream scatter_wire_ = Stream::inline_host();
  Stream sum_ = Stream::inline_host();
  Stream gather_wire_ = Stream::inline_host();
  Stream decode_ = Stream::inline_host();
};

}  // namespace hsdp::quant
