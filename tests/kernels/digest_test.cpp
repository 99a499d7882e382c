#include "hsdp/kernels/digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

namespace hsdp::kernels {
namespace {

std::vector<unsigned char> some_bytes(std::size_t count) {
  std::mt19937 random(7);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

ConstTensorView view_of(const std::vector<unsigned char>& bytes) {
  return {bytes.data(), static_cast<std::int64_t>(bytes.size()), Dtype::kU8, Device()};
}

TEST(Digest, EveryBitChangesIt) {
  for (const std::size_t size : {1, 8, 61}) {
    std::vector<unsigned char> bytes = some_bytes(size);
    std::set<std::uint64_t> seen{digest(view_of(bytes))};
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= static_cast<unsigned char>(1U << bit % 8);
      EXPECT_TRUE(seen.insert(digest(view_of(bytes))).second) << "bit " << bit;
      bytes[bit / 8] ^= static_cast<unsigned char>(1U << bit % 8);
    }
  }
}

TEST(Digest, PlacesCount) {
  std::vector<unsigned char> bytes = some_bytes(64);
  const std::uint64_t before = digest(view_of(bytes));
  std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8);
  EXPECT_NE(digest(view_of(bytes)), before);
}

TEST(Digest, ComesInPieces) {
  const std::vector<unsigned char> bytes = some_bytes(100);
  const ConstTensorView whole = view_of(bytes);
  const ConstTensorView first = whole.slice(0, 40);
  EXPECT_EQ(digest_places(first), 5);
  EXPECT_EQ(digest(first) + digest(whole.slice(40, 60), digest_places(first)), digest(whole));
}

// The definition in the header must hold, so that digests of two versions can be compared.
TEST(Digest, IsTheSumOfSplitMix64) {
  const std::vector<unsigned char> bytes{1, 0, 0, 0, 0, 0, 0, 0, 2};
  std::uint64_t expected = 0;
  for (std::uint64_t i = 0; i < 2; ++i) {
    std::uint64_t z = (i + 1) + (i + 1) * 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    expected += z ^ (z >> 31);
  }
  EXPECT_EQ(digest(view_of(bytes)), expected);
}

}  // namespace
}  // namespace hsdp::kernels
