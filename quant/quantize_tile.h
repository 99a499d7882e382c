// What a kernel does to one tile or one group, element by element. Internal to quant/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/quantize.h"

namespace hsdp::quant {

struct TileGroup {
  std::int32_t begin = 0;  // first element, in the tile
  std::int32_t count = 0;
  std::int32_t number = 0;  // in the tile
};

// How many elements of the tile's first group precede the tile.
[[nodiscard]] HSDP_HOST_DEVICE inline std::int32_t head_of(const GroupTile& tile, int group_size) {
  // A GPU has no 64-bit divide instruction, and most sizes do not need a division.
  const bool is_power_of_two = (group_size & (group_size - 1)) == 0;
  return static_cast<std::int32_t>(is_power_of_two ? tile.flat_offset & (group_size - 1)
                                                   : tile.flat_offset % group_size);
}

[[nodiscard]] HSDP_HOST_DEVICE inline std::int32_t group_count(const GroupTile& tile,
                                                               int group_size) {
  return (head_of(tile, group_size) + tile.count + group_size - 1) / group_size;
}

// `head` is head_of() the tile.
[[nodiscard]] HSDP_HOST_DEVICE inline TileGroup group_after(std::int32_t head,
                                                            std::int32_t tile_count, int group_size,
                                                            std::int32_t number) {
  const std::int32_t begin = number == 0 ? 0 : number * group_size - head;
  const std::int32_t end = (number + 1) * group_size - head;
  return {begin, (end < tile_count ? end : tile_count) - begin, number};
}

[[nodiscard]] HSDP_HOST_DEVICE inline TileGroup group_of(const GroupTile& tile, int group_size,
                                                         std::int32_t number) {
  return group_after(head_of(tile, group_size), tile.count, group_size, number);
}

// Where a tile's codes and scales lie in a message.
struct TilePlace {
  std::byte* codes = nullptr;   // of its first group
  std::byte* scales = nullptr;  // of its first group
  // Of the first group, which may be short even if others follow it, and of each later one.
  std::int32_t first_code_bytes = 0;
  std::int32_t code_bytes = 0;
  std::int32_t scale_bytes = 0;

  [[nodiscard]] HSDP_HOST_DEVICE std::byte* codes_of(std::int32_t group) const {
    if (group == 0) return codes;
    return codes + first_code_bytes + static_cast<std::ptrdiff_t>(group - 1) * code_bytes;
  }
  [[nodiscard]] HSDP_HOST_DEVICE std::byte* scale_of(std::int32_t group) const {
    return scales + static_cast<std::ptrdiff_t>(group) * scale_bytes;
  }
};

// `first_count`: elements of the tile's first group.
[[nodiscard]] HSDP_HOST_DEVICE inline TilePlace place_of(const Message& message,
                                                         const GroupTile& tile,
                                                         std::int32_t first_count) {
  const MessageRow& row = message.rows[tile.owner];
  const Code code = message.format.code;
  const std::int64_t before = code == Code::kBf16   ? std::int64_t{2} * tile.position
                              : code == Code::kInt4 ? std::int64_t{4} * tile.int4_words
                                                    : std::int64_t{4} * tile.int8_words;
  const int scale_size = scale_bytes(message.format);
  return {message.data + (row.codes - message.begin) + before,
          message.data + (row.scales - message.begin) + std::int64_t{scale_size} * tile.group,
          static_cast<std::int32_t>(code_bytes(code, first_count)),
          static_cast<std::int32_t>(code_bytes(code, message.format.group_size)), scale_size};
}
[[nodiscard]] HSDP_HOST_DEVICE inline TilePlace place_of(const Message& message,
                                                         const GroupTile& tile) {
  return place_of(message, tile, group_of(tile, message.format.group_size, 0).count);
}

// Writes the padding after a row's scales and codes, with the row's last tile.
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

// One group of a tile. Returns whether it is marked, or has a value that is not finite.
bool quantize_group(const Quantize& args, const GroupTile& tile, const TileGroup& group,
                    TileFigures* figures);
bool dequantize_group(const Dequantize& args, const GroupTile& tile, const TileGroup& group);
}  // namespace hsdp::quant
