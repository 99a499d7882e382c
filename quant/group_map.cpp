#include "quant/group_map.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::quant {
namespace {

// 4-byte words of codes in a stretch of a flattened parameter.
std::int32_t code_words(Code code, std::int64_t flat_offset, std::int64_t count, int group_size) {
  const std::int64_t head = std::min(count, padded(flat_offset, group_size) - flat_offset);
  const std::int64_t whole = (count - head) / group_size;
  const std::int64_t tail = (count - head) % group_size;
  return static_cast<std::int32_t>(
      (code_bytes(code, head) + whole * code_bytes(code, group_size) + code_bytes(code, tail)) / 4);
}

std::int32_t groups_in(std::int64_t flat_offset, std::int64_t count, int group_size) {
  const std::int64_t first = flat_offset / group_size;
  return static_cast<std::int32_t>(padded(flat_offset + count, group_size) / group_size - first);
}

}  // namespace

GroupMap::GroupMap(std::span<const ParameterRange> runs, int group_size, int owners)
    : GroupMap(runs, group_size, owners, nullptr) {}

GroupMap::GroupMap(std::span<const ParameterRange> runs, int group_size, const RowCut& owners)
    : GroupMap(runs, group_size, owners.size(), &owners) {}

GroupMap::GroupMap(std::span<const ParameterRange> runs, int group_size, int owners,
                   const RowCut* cut)
    : group_size_(group_size) {
  require_valid({.group_size = group_size});
  std::int64_t total = 0;
  for (const ParameterRange& run : runs) total += run.count;
  if (total > std::numeric_limits<std::int32_t>::max()) {
    throw UsageError({.where = "quant: bucket",
                      .expected = "at most 2^31 - 1 elements",
                      .got = std::to_string(total),
                      .remedy = "use smaller bucket_bytes"});
  }
  const std::int64_t row = (total + owners - 1) / owners;
  const std::int64_t room = kTileElements - kTileElements % group_size;
  Begin at;
  int owner = 0;
  for (const ParameterRange& run : runs) {
    for (std::int64_t done = 0; done < run.count;) {
      const std::int64_t flat_offset = run.flat_offset + done;
      std::int64_t count = std::min(run.count - done, room - flat_offset % group_size);
      if (cut != nullptr) {
        while (run.offset >= cut->begin(owner + 1)) ++owner;
      } else {
        owner = static_cast<int>(at.position / row);
        const std::int64_t left_of_row = (owner + 1) * row - at.position;
        count = std::min(count, padded(flat_offset + left_of_row, group_size) - flat_offset);
      }
      while (std::ssize(begins_) <= owner) begins_.push_back(at);
      tiles_.push_back({.element = run.offset + done,
                        .flat_offset = flat_offset,
                        .count = static_cast<std::int32_t>(count),
                        .parameter = run.parameter,
                        .owner = owner,
                        .position = at.position,
                        .group = at.group,
                        .int4_words = at.int4_words,
                        .int8_words = at.int8_words});
      ++at.tile;
      at.position += static_cast<std::int32_t>(count);
      at.group += groups_in(flat_offset, count, group_size);
      at.int4_words += code_words(Code::kInt4, flat_offset, count, group_size);
      at.int8_words += code_words(Code::kInt8, flat_offset, count, group_size);
      done += count;
    }
  }
  begins_.resize(static_cast<std::size_t>(owners) + 1, at);
}

std::span<const GroupTile> GroupMap::tiles(int owner) const {
  const std::size_t first = begin(owner).tile;
  return tiles().subspan(first, begin(owner + 1).tile - first);
}

MessageLayout::MessageLayout(const GroupMap& map, const GroupFormat& format)
    : format_(format), cut_(0, 1) {
  std::vector<std::int64_t> offsets{0};
  for (int owner = 0; owner < map.owners(); ++owner) {
    const std::int64_t offset = offsets.back();
    const GroupMap::Begin& from = map.begin(owner);
    const GroupMap::Begin& to = map.begin(owner + 1);
    if (format.code == Code::kBf16) {
      rows_.push_back({.group_end = to.group});
      offsets.push_back(offset + 2 * static_cast<std::int64_t>(to.position - from.position));
      continue;
    }
    const bool is_int4 = format.code == Code::kInt4;
    const std::int64_t first_word = is_int4 ? from.int4_words : from.int8_words;
    const std::int64_t end_word = is_int4 ? to.int4_words : to.int8_words;
    const std::int64_t scale = scale_bytes(format);
    const std::int64_t codes = offset + padded(scale * (to.group - from.group), kRowAlignment);
    rows_.push_back({.scales = offset - scale * from.group,
                     .codes = codes - 4 * first_word,
                     .group_end = to.group,
                     .word_end = static_cast<std::int32_t>(end_word)});
    offsets.push_back(codes + padded(4 * (end_word - first_word), kRowAlignment));
  }
  cut_ = RowCut(std::move(offsets));
}

}  // namespace hsdp::quant
