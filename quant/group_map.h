// Where the groups of some slices lie in a bucket's memory and in the messages that carry them, and
// which replica owns them. Plain data, no communication.
//
// A map covers some runs of parameters, joined in their order, at most 2^31 - 1 elements. Owner r
// has the groups that begin in [r * ceil(n / owners), (r + 1) * ceil(n / owners)) of n joined
// elements, or a cut gives the owner of each run. Maps and owners do not change the bits: all
// arithmetic stays within a group.
//
// Kernels work on tiles: consecutive groups of one parameter with one owner.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/row_cut.h"
#include "quant/group_format.h"

namespace hsdp::quant {

// Capacity of a tile's whole groups; short groups count as whole ones.
constexpr int kTileElements = 4096;

struct GroupTile {
  std::int64_t element = 0;      // of the first element, in the bucket's memory
  std::int64_t flat_offset = 0;  // of the first element, in the flattened parameter
  std::int32_t count = 0;        // elements
  std::int32_t parameter = 0;
  std::int32_t owner = 0;
  // What precedes the tile in the map: elements, groups, and 4-byte words of int4 and int8 codes.
  std::int32_t position = 0;
  std::int32_t group = 0;
  std::int32_t int4_words = 0;
  std::int32_t int8_words = 0;
};

class GroupMap {
 public:
  // The offsets of `runs` are places in the bucket's memory; runs need not be adjacent.
  GroupMap(std::span<const ParameterRange> runs, int group_size, int owners);
  // `owners`: a cut of the bucket's memory. Each run lies in one of its rows; runs are in row
  // order.
  GroupMap(std::span<const ParameterRange> runs, int group_size, const RowCut& owners);

  [[nodiscard]] int group_size() const { return group_size_; }
  [[nodiscard]] int owners() const { return static_cast<int>(begins_.size()) - 1; }
  [[nodiscard]] std::int64_t element_count() const { return begins_.back().position; }
  [[nodiscard]] std::int64_t group_count() const { return begins_.back().group; }
  // In order; the tiles of one owner are consecutive.
  [[nodiscard]] std::span<const GroupTile> tiles() const { return tiles_; }
  [[nodiscard]] std::span<const GroupTile> tiles(int owner) const;
  // What precedes an owner's tiles, equal to the fields of its first tile if it has one. Owner
  // owners() stands for the end.
  struct Begin {
    std::size_t tile = 0;
    std::int32_t position = 0;
    std::int32_t group = 0;
    std::int32_t int4_words = 0;
    std::int32_t int8_words = 0;
  };
  [[nodiscard]] const Begin& begin(int owner) const {
    return begins_[static_cast<std::size_t>(owner)];
  }

 private:
  GroupMap(std::span<const ParameterRange> runs, int group_size, int owners, const RowCut* cut);

  int group_size_;
  std::vector<GroupTile> tiles_;
  std::vector<Begin> begins_;  // one per owner, and the end
};

// Byte offsets of an owner's groups in a message: scale g lies at `scales` + g * scale_bytes, the
// codes from word w of the map on at `codes` + 4 w (bf16: element p at `codes` + 2 p).
struct MessageRow {
  std::int64_t scales = 0;
  std::int64_t codes = 0;
  std::int32_t group_end = 0;  // end of its last group, in the map
  std::int32_t word_end = 0;
};

// A message in one format, with one row per owner.
class MessageLayout {
 public:
  MessageLayout(const GroupMap& map, const GroupFormat& format);

  [[nodiscard]] const GroupFormat& format() const { return format_; }
  [[nodiscard]] std::span<const MessageRow> rows() const { return rows_; }
  [[nodiscard]] const RowCut& cut() const { return cut_; }  // in bytes

 private:
  GroupFormat format_;
  std::vector<MessageRow> rows_;
  RowCut cut_;
};

}  // namespace hsdp::quant
