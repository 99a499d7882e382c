#include "quant/loco_exchange.h"

#include <algorithm>
#include <utility>

#include "hsdp/device/copy.h"

namespace hsdp::quant {
namespace {

// Windows in flight: enough that codec and wire never wait for each other.
constexpr std::size_t kHostSlots = 8;
constexpr std::size_t kCudaSlots = 3;

TensorView bytes_at(const Buffer& buffer, std::int64_t begin, std::int64_t length) {
  return {buffer.data() + begin, length, Dtype::kU8, buffer.device()};
}

bool is_pending(const Event& event) {
  try {
    return !event.complete();
  } catch (const std::exception&) {  // the device has failed
    return false;
  }
}

}  // namespace

std::vector<std::vector<ParameterRange>> cut_into_windows(std::span<const ParameterRange> ranges,
                                                          int group_size,
                                                          std::int64_t window_elements) {
  std::int64_t left = 0;
  for (const ParameterRange& range : ranges) left += range.count;
  std::vector<std::vector<ParameterRange>> windows;
  std::int64_t room = 0;
  for (ParameterRange range : ranges) {
    while (range.count > 0) {
      if (room <= 0) {
        windows.emplace_back();
        const std::int64_t count = (left + window_elements - 1) / window_elements;
        room = (left + count - 1) / count;
      }
      const std::int64_t to_cut = padded(range.flat_offset + room, group_size) - range.flat_offset;
      ParameterRange part = range;
      part.count = std::min(range.count, to_cut);
      windows.back().push_back(part);
      range.offset += part.count;
      range.flat_offset += part.count;
      range.count -= part.count;
      room -= part.count;
      left -= part.count;
    }
  }
  return windows;
}

std::vector<std::vector<ParameterRange>> cut_into_windows(std::span<const ParameterRange> ranges,
                                                          int group_size,
                                                          std::int64_t window_elements,
                                                          const RowCut& parts) {
  const std::int64_t part_elements = std::max<std::int64_t>(1, window_elements / parts.size());
  std::vector<std::vector<ParameterRange>> windows;
  for (int part = 0; part < parts.size(); ++part) {
    const auto end = std::ranges::find_if(
        ranges, [&](const ParameterRange& range) { return range.offset >= parts.begin(part + 1); });
    const auto count = static_cast<std::size_t>(end - ranges.begin());
    const auto pieces = cut_into_windows(ranges.first(count), group_size, part_elements);
    ranges = ranges.subspan(count);
    windows.resize(std::max(windows.size(), pieces.size()));
    for (std::size_t w = 0; w < pieces.size(); ++w) {
      windows[w].insert(windows[w].end(), pieces[w].begin(), pieces[w].end());
    }
  }
  return windows;
}

LocoWindow::LocoWindow(std::vector<ParameterRange> runs_, GroupMap map_,
                       const ExchangeFormats& formats, Device device)
    : runs(std::move(runs_)),
      map(std::move(map_)),
      scattered(map, formats.scattered),
      gathered(map, formats.gathered),
      tiles(map.tiles()),
      scattered_rows(scattered.rows().data()),
      gathered_rows(gathered.rows().data()) {
  if (device.type == DeviceType::kHost) return;
  const std::size_t tile_bytes = tiles.size_bytes();
  const std::size_t row_bytes = scattered.rows().size_bytes();
  tables = Buffer(device, tile_bytes + 2 * row_bytes);
  Stream stream = Stream::create(device, "hsdp-loco");
  const auto put = [&](std::size_t offset, const void* from, std::size_t size) {
    copy_bytes(tables.data() + offset, from, size, stream);
    return tables.data() + offset;
  };
  stream.run([&] {
    scattered_rows =
        reinterpret_cast<const MessageRow*>(put(0, scattered.rows().data(), row_bytes));
    gathered_rows =
        reinterpret_cast<const MessageRow*>(put(row_bytes, gathered.rows().data(), row_bytes));
    tiles = {reinterpret_cast<const GroupTile*>(put(2 * row_bytes, map.tiles().data(), tile_bytes)),
             map.tiles().size()};
  });
  stream.synchronize();
}

std::span<const GroupTile> LocoWindow::own_tiles(int replica) const {
  const std::size_t first = map.begin(replica).tile;
  return tiles.subspan(first, map.begin(replica + 1).tile - first);
}

ExchangeNeed exchange_need(std::span<const LocoWindow> windows, const ExchangeFormats& formats,
                           Device device) {
  ExchangeNeed need;
  for (const LocoWindow& window : windows) {
    const RowCut& cut = window.scattered.cut();
    need.scattered = std::max(need.scattered, cut.count());
    need.wire += cut.count();
    for (int r = 0; r < cut.size(); ++r) {
      need.received = std::max(need.received, cut.size() * cut.length(r));
    }
    if (!formats.gathers) continue;
    need.gathered = std::max(need.gathered, window.gathered.cut().count());
    need.wire += window.gathered.cut().count();
  }
  need.slots = std::min(device.type == DeviceType::kHost ? kHostSlots : kCudaSlots, windows.size());
  return need;
}

LocoExchange::LocoExchange(std::vector<LocoWindow> windows, const ExchangeFormats& formats,
                           Device device, const MemoryCount& memory)
    : windows_(std::move(windows)), formats_(formats), device_(device) {
  const ExchangeNeed need = exchange_need(windows_, formats_, device);
  slots_.resize(need.slots);
  for (Slot& slot : slots_) {
    slot.scattered = Buffer(device, static_cast<std::size_t>(need.scattered));
    slot.received = Buffer(device, static_cast<std::size_t>(need.received));
    slot.gathered = Buffer(device, static_cast<std::size_t>(need.gathered));
  }
  held_ = memory.hold(MemoryKind::kStaging, need.staging());
}

void LocoExchange::bind(Communicator scatter, Communicator gather) {
  finish();
  scatter_ = std::move(scatter);
  gather_ = std::move(gather);
  if (!scatter_) return;
  encode_ = Stream::create(device_, "hsdp-encode");
  scatter_wire_ = Stream::create(device_, "hsdp-scatter");
  decode_ = Stream::create(device_, "hsdp-decode");
  if (formats_.gathers) {
    sum_ = Stream::create(device_, "hsdp-sum");
    gather_wire_ = Stream::create(device_, "hsdp-gather");
  }
  for (Slot& slot : slots_) slot.free = {};
}

void LocoExchange::finish() noexcept {
  bool hangs = false;  // the GPU, in a collective that cannot be ended; later work waits for it
  for (Stream* const stream : {&encode_, &scatter_wire_, &sum_, &gather_wire_, &decode_}) {
    Event done;
    try {
      done = stream->record();
      if (hangs) {
        free_after(device_, done);
      } else if (scatter_) {
        scatter_.wait(done);
      } else {
        done.wait();
      }
    } catch (const std::exception&) {  // the Event's error
      hangs = is_pending(done);
    }
  }
}

LocoExchange::Slot& LocoExchange::next_slot() {
  Slot& slot = slots_[slot_];
  slot_ = (slot_ + 1) % slots_.size();
  return slot;
}

void LocoExchange::reduce(std::size_t number, const Arguments& arguments, const Errors& errors,
                          const Event& ready) {
  const LocoWindow& window = windows_[number];
  Slot& slot = next_slot();
  encode_and_scatter(window, slot, arguments, errors.scattered, ready);
  if (formats_.gathers) {
    sum_and_gather(window, slot, arguments, errors.gathered);
  } else {
    sum_part(window, slot, arguments);
  }
  slot.free = decode_.record();
}

void LocoExchange::encode_and_scatter(const LocoWindow& window, const Slot& slot,
                                      const Arguments& arguments, const ErrorStates::Step& errors,
                                      const Event& ready) {
  const int own = replica();
  Quantize encode;
  encode.tiles = window.tiles;
  encode.group_size = formats_.scattered.group_size;
  encode.values = static_cast<const float*>(arguments.bucket.data.data);
  encode.factor = 1.0F / static_cast<float>(arguments.bucket.arithmetic.mean_divisor);
  encode.before = errors.before;
  encode.after = errors.after;
  encode.beta = arguments.beta;
  encode.out = {formats_.scattered, slot.scattered.data(), 0, window.scattered_rows};
  encode.figures = arguments.scattered_figures;
  encode.nonfinite = arguments.bucket.nonfinite;
  encode_.wait(slot.free);
  encode_.wait(ready);
  encode_.run([this, encode, dithers = arguments.dithers,
               dither = arguments.dither(2U * static_cast<std::uint32_t>(own))]() mutable {
    if (dithers) encode.dither = &dither;
    quantize(encode, encode_.inside_task());
  });

  scatter_wire_.wait(encode_.record());
  const RowCut& cut = window.scattered.cut();
  scatter_.all_to_all(bytes_at(slot.scattered, 0, cut.count()),
                      bytes_at(slot.received, 0, cut.length(own) * replicas()), scatter_wire_, cut,
                      arguments.label());
}

ReceivedMessages LocoExchange::received(const LocoWindow& window, const Slot& slot) const {
  const RowCut& cut = window.scattered.cut();
  const int own = replica();
  return {
      .first = {formats_.scattered, slot.received.data(), cut.begin(own), window.scattered_rows},
      .distance = cut.length(own),
      .count = replicas()};
}

void LocoExchange::sum_and_gather(const LocoWindow& window, const Slot& slot,
                                  const Arguments& arguments, const ErrorStates::Step& errors) {
  const int own = replica();
  const GroupMap::Begin& own_begin = window.map.begin(own);
  const Message result{formats_.gathered, slot.gathered.data(), 0, window.gathered_rows};
  Quantize sum;
  sum.tiles = window.own_tiles(own);
  sum.group_size = formats_.gathered.group_size;
  sum.before = errors.before;
  sum.after = errors.after;
  for (ErrorState* const state : {&sum.before, &sum.after}) {
    state->position = own_begin.position;
    state->group = own_begin.group;
  }
  sum.beta = arguments.beta;
  sum.out = result;
  sum.figures = arguments.gathered_figures;
  sum.nonfinite = arguments.bucket.nonfinite;
  sum.received = received(window, slot);
  sum_.wait(scatter_wire_.record());
  sum_.run([this, sum, dithers = arguments.dithers, dither = arguments.dither(1)]() mutable {
    if (dithers && sum.before.codes != nullptr) sum.dither = &dither;
    if (!sum.tiles.empty()) quantize(sum, sum_.inside_task());
  });

  gather_wire_.wait(sum_.record());
  const RowCut& cut = window.gathered.cut();
  const TensorView all = bytes_at(slot.gathered, 0, cut.count());
  gather_.all_gather(all.slice(cut.begin(own), cut.length(own)), all, gather_wire_, cut,
                     arguments.label());

  const Dequantize decode{.tiles = window.tiles,
                          .group_size = formats_.gathered.group_size,
                          .in = {.first = result, .count = 1},
                          .values = static_cast<float*>(arguments.bucket.data.data),
                          .nonfinite = arguments.bucket.nonfinite};
  decode_.wait(gather_wire_.record());
  decode_.run([this, decode] { dequantize(decode, decode_.inside_task()); });
}

void LocoExchange::sum_part(const LocoWindow& window, const Slot& slot,
                            const Arguments& arguments) {
  const Dequantize sum{.tiles = window.own_tiles(replica()),
                       .group_size = formats_.scattered.group_size,
                       .in = received(window, slot),
                       .values = static_cast<float*>(arguments.bucket.part.data),
                       .begin = arguments.part_begin,
                       .nonfinite = arguments.bucket.nonfinite};
  decode_.wait(scatter_wire_.record());
  decode_.run([this, sum] { dequantize(sum, decode_.inside_task()); });
}

Event LocoExchange::all_reduce(const AllReduce& args, const Event& ready) {
  scatter_wire_.wait(ready);
  scatter_.all_reduce(args, scatter_wire_);
  return scatter_wire_.record();
}

Event LocoExchange::reduce_scatter(const PlainScatter& plain, const HopBucket& bucket,
                                   const Event& ready) {
  scatter_wire_.wait(ready);
  scatter_wire_.run([this, &plain, bucket] { plain.round(bucket, scatter_wire_.inside_task()); });
  scatter_.reduce_scatter(plain.call(bucket), scatter_wire_);
  return scatter_wire_.record();
}

}  // namespace hsdp::quant
