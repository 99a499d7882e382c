// What a kernel does to one tile or one group, element by element. Internal to quant/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/quantize.h"

namespace hsdp::quant {

// A group of a tile.
struct TileGroup {
  std::int32_t begin = 0;  // its first element, in the tile
  std::int32_t count = 0;
  std::int32_t number = 0;  // in the tile
};

[[nodiscard]] HSDP_HOST_DEVICE inline std::int32_t group_count(const GroupTile& tile,
                                                               int group_size) {
  const auto head = static_cast<std::int32_t>(tile.flat_offset % group_size);
  return (head + tile.count + group_size - 1) / group_size;
}

[[nodiscard]] HSDP_HOST_DEVICE inline TileGroup group_of(const GroupTile& tile, int group_size,
                                                         std::int32_t number) {
  const auto head = static_cast<std::int32_t>(tile.flat_offset % group_size);
  const std::int32_t begin = number == 0 ? 0 : number * group_size - head;
  const std::int32_t end = (number + 1) * group_size - head;
  return {begin, (end < tile.count ? end : tile.count) - begin, number};
}

// The codes of a tile's group in a message: only the first group of a tile may be short and have
// others after it.
[[nodiscard]] HSDP_HOST_DEVICE inline std::byte* codes_of(const Message& message,
                                                          const GroupTile& tile,
                                                          const TileGroup& group,
                                                          std::int32_t first_count) {
  const MessageRow& row = message.rows[tile.owner];
  std::byte* const data = message.data + (row.codes - message.begin);
  const Code code = message.format.code;
  if (code == Code::kBf16) {
    return data + 2 * (static_cast<std::int64_t>(tile.position) + group.begin);
  }
  const std::int64_t words = code == Code::kInt4 ? tile.int4_words : tile.int8_words;
  std::int64_t before = 0;
  if (group.number > 0) {
    before = code_bytes(code, first_count) +
             (group.number - 1) * code_bytes(code, message.format.group_size);
  }
  return data + 4 * words + before;
}

[[nodiscard]] HSDP_HOST_DEVICE inline std::byte* scale_of(const Message& message,
                                                          const GroupTile& tile,
                                                          const TileGroup& group) {
  const MessageRow& row = message.rows[tile.owner];
  return message.data + (row.scales - message.begin) +
         scale_bytes(message.format) * (static_cast<std::int64_t>(tile.group) + group.number);
}

// The fillers behind a row's scales and codes, with the row's last tile.
HSDP_HOST_DEVICE inline void write_fillers(const Message& message, const GroupTile& tile,
                                           std::int32_t groups) {
  if (message.format.code == Code::kBf16) return;
  const MessageRow& row = message.rows[tile.owner];
  if (tile.group + groups != row.group_end) return;
  const std::int64_t ends[] = {
      row.scales + static_cast<std::int64_t>(scale_bytes(message.format)) * row.group_end,
      row.codes + 4 * static_cast<std::int64_t>(row.word_end)};
  for (const std::int64_t end : ends) {
    for (std::int64_t at = end; at < padded(end, kRowAlignment); ++at) {
      message.data[at - message.begin] = std::byte{0};
    }
  }
}

// One group of a tile. Returns whether it is marked.
bool quantize_group(const Quantize& args, const GroupTile& tile, const TileGroup& group,
                    TileFigures* figures);
bool dequantize_group(const Dequantize& args, const GroupTile& tile, const TileGroup& group);
}  // namespace hsdp::quant
