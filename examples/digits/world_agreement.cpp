#include "examples/digits/world_agreement.h"

#include <stdexcept>

namespace examples {

std::vector<double> sum_over_world(hsdp::Communicator& world, std::vector<double> shares) {
  world.all_reduce({.data = shares.data(),
                    .count = static_cast<std::int64_t>(shares.size()),
                    .dtype = hsdp::Dtype::kF64});
  return shares;
}

void expect_same(hsdp::Communicator& world, const std::string& hash) {
  const std::vector<std::string> hashes = world.exchange(hash, "comparison of final weights");
  for (std::size_t rank = 0; rank < hashes.size(); ++rank) {
    if (hashes[rank] != hashes[0]) {
      throw std::runtime_error("training: final weights differ: expected " + hashes[0] + ", got " +
                               hashes[rank] + " (rank " + std::to_string(rank) + " of " +
                               std::to_string(hashes.size()) + ")");
    }
  }
}

}  // namespace examples
