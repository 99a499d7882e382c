// A hop's errors as pieces that can be saved, and put back into a hop whose buckets or windows are
// other ones.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "hsdp/replica_hop.h"
#include "quant/quantize.h"

namespace hsdp::quant {

// Errors of elements [flat_offset, flat_offset + count) of a flattened parameter. Cuts lie at
// groups, or where a slice begins or ends.
struct ErrorPiece {
  int parameter = 0;
  bool gathered = false;  // of the gathered half
  std::int64_t flat_offset = 0;
  std::int64_t count = 0;
  ErrorState errors;  // from that element and its group on
};

[[nodiscard]] std::int64_t group_count(const ErrorPiece& piece, int group_size);

// What tiles hold, joined where they follow one another. `errors` are those of the first tile on.
[[nodiscard]] std::vector<ErrorPiece> pieces_of(std::span<const GroupTile> tiles, int group_size,
                                                bool gathered, const ErrorState& errors);

// As a hop hands them out, and back. UsageError for what is no such state.
void append(const ErrorPiece& piece, int group_size, Device device, std::vector<HopState>& to);
[[nodiscard]] std::vector<ErrorPiece> pieces_from(std::span<const HopState> state, int group_size);

// How many elements they have in common. UsageError where they have other groups there or another
// kind of errors.
[[nodiscard]] std::int64_t common_elements(const ErrorPiece& from, const ErrorPiece& to,
                                           int group_size);
// Enqueues copies of these.
void copy(const ErrorPiece& from, const ErrorPiece& to, int group_size, const Stream& stream);

}  // namespace hsdp::quant
