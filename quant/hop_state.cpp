#include "quant/hop_state.h"

#include <algorithm>
#include <string>

#include "hsdp/device/copy.h"
#include "hsdp/error.h"

namespace hsdp::quant {
namespace {

std::int64_t groups_between(std::int64_t begin, std::int64_t end, int group_size) {
  return padded(end, group_size) / group_size - begin / group_size;
}

ErrorState moved(const ErrorState& errors, std::int64_t elements, std::int64_t groups) {
  ErrorState result = errors;
  if (errors.codes != nullptr) result.codes += elements;
  if (errors.scales != nullptr) result.scales += groups;
  if (errors.values != nullptr) result.values += elements;
  return result;
}

constexpr std::string_view kKinds[2][3] = {{"codes", "scales", "values"},
                                           {"gather/codes", "gather/scales", "gather/values"}};

[[noreturn]] void refuse(const std::string& expected, const std::string& got,
                         const std::string& remedy) {
  throw UsageError(
      {.where = "loco: load_state", .expected = expected, .got = got, .remedy = remedy});
}

}  // namespace

std::int64_t group_count(const ErrorPiece& piece, int group_size) {
  return groups_between(piece.flat_offset, piece.flat_offset + piece.count, group_size);
}

std::vector<ErrorPiece> pieces_of(std::span<const GroupTile> tiles, int group_size, bool gathered,
                                  const ErrorState& errors) {
  std::vector<ErrorPiece> pieces;
  for (const GroupTile& tile : tiles) {
    if (!pieces.empty()) {
      ErrorPiece& last = pieces.back();
      if (last.parameter == tile.parameter && last.flat_offset + last.count == tile.flat_offset &&
          tile.flat_offset % group_size == 0) {
        last.count += tile.count;
        continue;
      }
    }
    const GroupTile& first = tiles.front();
    pieces.push_back({tile.parameter, gathered, tile.flat_offset, tile.count,
                      moved(errors, tile.position - first.position, tile.group - first.group)});
  }
  return pieces;
}

void append(const ErrorPiece& piece, int group_size, Device device, std::vector<HopState>& to) {
  const std::string_view* const kinds = kKinds[piece.gathered ? 1 : 0];
  const auto add = [&](std::string_view kind, void* data, std::int64_t count, Dtype dtype) {
    to.push_back(
        {piece.parameter, std::string(kind), piece.flat_offset, {data, count, dtype, device}});
  };
  if (piece.errors.values != nullptr) {
    add(kinds[2], piece.errors.values, piece.count, Dtype::kF32);
    return;
  }
  add(kinds[0], piece.errors.codes, piece.count, Dtype::kU8);
  add(kinds[1], piece.errors.scales, group_count(piece, group_size), Dtype::kF32);
}

std::vector<ErrorPiece> pieces_from(std::span<const HopState> state, int group_size) {
  std::vector<ErrorPiece> pieces;
  for (const HopState& one : state) {
    if (one.parameter < 0) continue;
    for (const bool gathered : {false, true}) {
      const std::string_view* const kinds = kKinds[gathered ? 1 : 0];
      ErrorPiece piece{one.parameter, gathered, one.flat_offset, one.data.count, {}};
      if (one.kind == kinds[2]) {
        piece.errors.values = static_cast<float*>(one.data.data);
        pieces.push_back(piece);
      } else if (one.kind == kinds[0]) {
        piece.errors.codes = static_cast<std::int8_t*>(one.data.data);
        const auto scales = std::ranges::find_if(state, [&](const HopState& other) {
          return other.parameter == one.parameter && other.flat_offset == one.flat_offset &&
                 other.kind == kinds[1];
        });
        const std::int64_t groups =
            groups_between(one.flat_offset, one.flat_offset + one.data.count, group_size);
        if (scales == state.end() || scales->data.count != groups) {
          refuse(std::to_string(groups) + " scales beside the " + std::to_string(one.data.count) +
                     " codes from " + std::to_string(one.flat_offset) + " of parameter " +
                     std::to_string(one.parameter),
                 scales == state.end() ? "none" : std::to_string(scales->data.count),
                 "use the group_size that it was saved with");
        }
        piece.errors.scales = static_cast<float*>(scales->data.data);
        pieces.push_back(piece);
      }
    }
  }
  return pieces;
}

std::int64_t common_elements(const ErrorPiece& from, const ErrorPiece& to, int group_size) {
  if (from.parameter != to.parameter || from.gathered != to.gathered) return 0;
  const std::int64_t begin = std::max(from.flat_offset, to.flat_offset);
  const std::int64_t from_end = from.flat_offset + from.count;
  const std::int64_t to_end = to.flat_offset + to.count;
  const std::int64_t end = std::min(from_end, to_end);
  if (begin >= end) return 0;
  if ((from.errors.values == nullptr) != (to.errors.values == nullptr)) {
    refuse(to.errors.values == nullptr ? "errors in int8" : "errors in f32", "the other kind",
           "use the error_dtype that it was saved with");
  }
  if ((begin % group_size != 0 && from.flat_offset != to.flat_offset) ||
      (end % group_size != 0 && from_end != to_end)) {
    refuse("groups cut where this layout cuts them", "other ones",
           "use the layout and the shard count that it was saved with");
  }
  return end - begin;
}

void copy(const ErrorPiece& from, const ErrorPiece& to, int group_size, const Stream& stream) {
  const std::int64_t count = common_elements(from, to, group_size);
  if (count == 0) return;
  const std::int64_t begin = std::max(from.flat_offset, to.flat_offset);
  const auto errors_of = [&](const ErrorPiece& piece) {
    return moved(piece.errors, begin - piece.flat_offset,
                 begin / group_size - piece.flat_offset / group_size);
  };
  const ErrorState source = errors_of(from);
  const ErrorState target = errors_of(to);
  const auto move = [&](auto* into, const auto* what, std::int64_t elements) {
    copy_bytes(into, what, static_cast<std::size_t>(elements) * sizeof *what, stream);
  };
  if (target.values != nullptr) {
    move(target.values, source.values, count);
  } else {
    move(target.codes, source.codes, count);
    move(target.scales, source.scales, groups_between(begin, begin + count, group_size));
  }
}

}  // namespace hsdp::quant
