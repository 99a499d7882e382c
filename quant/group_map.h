// Where the groups of some slices lie: in a bucket's memory, in the messages that carry them, and
// who owns them. Plain data, no communication.
//
// A map covers some runs of parameters, joined in their order, at most 2^31 - 1 elements. The
// groups are dealt out to `owners` in order: owner r gets those that begin in
// [r * ceil(n / owners), (r + 1) * ceil(n / owners)), of n joined elements. What lies in a map and
// who owns it has no influence on the bits: all arithmetic stays within a group.
//
// Kernels work on tiles: groups that follow one another in one parameter and have one owner.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/row_cut.h"
#include "quant/group_format.h"

namespace hsdp::quant {

// Whole groups of a tile fill at most that much room, short ones counted as whole.
constexpr int kTileElements = 4096;

struct GroupTile {
  std::int64_t element = 0;      // its first one, in the bucket's memory
  std::int64_t flat_offset = 0;  // of that in the flattened parameter
  std::int32_t count = 0;        // elements
  std::int32_t parameter = 0;
  std::int32_t owner = 0;
  // What lies before it in the map: elements, groups, words of 4 bytes of int4 and of int8 codes.
  std::int32_t position = 0;
  std::int32_t group = 0;
  std::int32_t int4_words = 0;
  std::int32_t int8_words = 0;
};

class GroupMap {
 public:
  // `runs`: offsets are places in the bucket's memory; they need not be adjacent.
  GroupMap(std::span<const ParameterRange> runs, int group_size, int owners);

  [[nodiscard]] int group_size() const { return group_size_; }
  [[nodiscard]] int owners() const { return static_cast<int>(begins_.size()) - 1; }
  [[nodiscard]] std::int64_t element_count() const { return begins_.back().position; }
  [[nodiscard]] std::int64_t group_count() const { return begins_.back().group; }
  // In order; those of one owner follow one another.
  [[nodiscard]] std::span<const GroupTile> tiles() const { return tiles_; }
  [[nodiscard]] std::span<const GroupTile> tiles(int owner) const;
  // What lies before an owner's tiles: as the first of them says, where there is one. owners() is
  // the end.
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
  int group_size_;
  std::vector<GroupTile> tiles_;
  std::vector<Begin> begins_;  // of every owner, and the end
};

// Where an owner's groups lie in a message: scale g at `scales` + g * scale_bytes, the codes that
// begin with word w of the map at `codes` + 4 w (of bf16: element p at `codes` + 2 p). In bytes.
struct MessageRow {
  std::int64_t scales = 0;
  std::int64_t codes = 0;
  std::int32_t group_end = 0;  // of its last group, in the map
  std::int32_t word_end = 0;
};

// A message in one format, with a row for each owner.
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
