// Cuts the parameters of a snapshot into pieces of work of bounded size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hsdp/snapshot.h"

namespace hsdp {

constexpr std::int64_t kPieceElements = std::int64_t{4} << 20;

// Elements [begin, end) of one parameter, as one replica holds them.
struct Piece {
  std::size_t parameter = 0;
  int replica = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

[[nodiscard]] inline std::vector<Piece> cut_into_pieces(
    const std::vector<SnapshotParameter>& parameters, int replica_count) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (int replica = 0; replica < replica_count; ++replica) {
      for (std::int64_t begin = 0; begin < parameters[i].count; begin += kPieceElements) {
        pieces.push_back(
            {i, replica, begin, std::min(begin + kPieceElements, parameters[i].count)});
      }
    }
  }
  return pieces;
}

[[nodiscard]] inline std::int64_t total_elements(const std::vector<Piece>& pieces) {
  std::int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.end - piece.begin;
  return total;
}

}  // namespace hsdp
