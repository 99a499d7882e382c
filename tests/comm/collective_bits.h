// All the bits that the collectives give, as one number.
#pragma once

#include <cstdint>

#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {

inline std::uint64_t hash(TensorView view, std::uint64_t start) {
  const auto* const bytes = static_cast<const unsigned char*>(view.data);
  for (std::size_t i = 0; i < view.size_in_bytes(); ++i)
    start = (start ^ bytes[i]) * 0x100000001b3U;
  return start;
}

// Everything once, on noise; one number for all the bits.
inline std::uint64_t hash_of_collectives(Communicator& world, Path path) {
  std::uint64_t bits = 0xcbf29ce484222325U;
  const std::int64_t count = 300'007;
  const auto size = world.size();
  for (const Dtype wire : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const Memory data(world, path, count, Dtype::kF32);
    for (std::int64_t i = 0; i < count; ++i) set(data.view(), i, noise(world.rank(), i));
    world.all_reduce({.data = data.view(), .wire = wire, .divisor = 3.0F});
    bits = hash(data.view(), bits);
  }
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const Memory in(world, path, count, dtype);
    const RowCut cut(count, size);
    const std::int64_t begin = cut.begin(world.rank());
    const Memory all(world, path, count, Dtype::kF32);
    const TensorView row = all.view().slice(begin, cut.length(world.rank()));
    for (std::int64_t i = 0; i < count; ++i) set(in.view(), i, noise(world.rank(), i));
    world.reduce_scatter({.in = in.view(), .out = row, .divisor = 5.0F});
    world.all_gather(row, all.view());
    bits = hash(all.view(), bits);
    world.broadcast(all.view(), size - 1);
    bits = hash(all.view(), bits);
  }
  return bits;
}

}  // namespace hsdp::test
