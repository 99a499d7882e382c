// A small generator (splitmix64) with the same numbers for every compiler and library.
#pragma once

#include <cstdint>

namespace examples {

class RandomSequence {
 public:
  explicit RandomSequence(std::uint64_t seed) : state_(seed) {}

  [[nodiscard]] std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15U;
    std::uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
    return bits ^ (bits >> 31);
  }
  // Uniform in [-limit, limit).
  [[nodiscard]] float next_within(float limit) {
    return limit * (static_cast<float>(next() >> 40) * 0x1p-23F - 1.0F);
  }

 private:
  std::uint64_t state_;
};

}  // namespace examples
