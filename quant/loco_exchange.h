// How a quantized bucket gets over the replicas: in windows, each in five stages that run beside
// those of other windows [Note: windows in flight].
//
//   encode    shard sums x factor + error -> a message with a row for each replica
//   scatter   all-to-all: every replica gets its row of all messages
//   sum       the rows in ascending replica + error -> this replica's row of the gathered message
//   gather    all-gather
//   decode    the whole message -> means, the same bits on every replica
//
// Used by one thread; the stages run on streams of its own.
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
};

// What of a bucket travels together. Cut at groups.
struct LocoWindow {
  LocoWindow(std::vector<ParameterRange> runs, const ExchangeFormats& formats, int replicas,
             Device device);

  std::vector<ParameterRange> runs;
  GroupMap map;
  MessageLayout scattered;
  MessageLayout gathered;
  // On the device; on the host what the map and the layouts hold.
  Buffer tables;
  std::span<const GroupTile> tiles;
  const MessageRow* scattered_rows = nullptr;
  const MessageRow* gathered_rows = nullptr;

  [[nodiscard]] std::span<const GroupTile> own_tiles(int replica) const;
};

// The windows of a bucket's ranges, all but the last about equally large.
[[nodiscard]] std::vector<std::vector<ParameterRange>> cut_into_windows(
    std::span<const ParameterRange> ranges, int group_size, std::int64_t window_elements);

class LocoExchange {
 public:
  LocoExchange(std::vector<LocoWindow> windows, const ExchangeFormats& formats, Device device,
               const MemoryCount& memory);

  [[nodiscard]] const std::vector<LocoWindow>& windows() const { return windows_; }
  [[nodiscard]] int replica() const { return scatter_.rank(); }

  void bind(Communicator scatter, Communicator gather);
  // Waits for what is under way, and throws nothing.
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
    std::uint32_t repeat = 0;                  // reductions of the bucket earlier in the step
    TileFigures* scattered_figures = nullptr;  // of the window's tiles
    TileFigures* gathered_figures = nullptr;   // of its own ones
  };
  // Enqueues a window, whose sums stand once `ready` is complete.
  void reduce(std::size_t window, const Arguments& arguments, const Errors& errors,
              const Event& ready);
  // Completes when all windows so far are decoded.
  [[nodiscard]] Event decoded() { return decode_.record(); }
  // The stream in which errors are read and written first.
  [[nodiscard]] const Stream& encode_stream() const { return encode_; }
  [[nodiscard]] const Stream& sum_stream() const { return sum_; }
  // Sums as they are, in the order of the windows.
  [[nodiscard]] Event all_reduce(const AllReduce& args, const Event& ready);

 private:
  struct Slot {
    Buffer scattered;
    Buffer received;
    Buffer gathered;
    Event free;
  };

  [[nodiscard]] int replicas() const { return scatter_.size(); }
  [[nodiscard]] Slot& next_slot();

  std::vector<LocoWindow> windows_;
  ExchangeFormats formats_;
  Device device_;
  std::vector<Slot> slots_;
  std::size_t slot_ = 0;
  MemoryCount::Held held_;
  Communicator scatter_;
  Communicator gather_;
  Stream encode_ = Stream::inline_host();  // streams of the device from bind() on
  Stream scatter_wire_ = Stream::inline_host();
  Stream sum_ = Stream::inline_host();
  Stream gather_wire_ = Stream::inline_host();
  Stream decode_ = Stream::inline_host();
};

}  // namespace hsdp::quant
