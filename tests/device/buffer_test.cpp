#include "hsdp/device/buffer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "hsdp/error.h"

namespace hsdp {
namespace {

static_assert(!std::is_copy_constructible_v<Buffer> && !std::is_copy_assignable_v<Buffer>);
static_assert(std::is_nothrow_move_constructible_v<Buffer>);

class BufferSizes : public ::testing::TestWithParam<std::size_t> {};

TEST_P(BufferSizes, AreAlignedZeroWritableAndResident) {
  const std::size_t size = GetParam();
  const Buffer buffer({}, size);
  ASSERT_EQ(buffer.size(), size);
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t alignment = size >= (2U << 20U) ? 2U << 20U : page_bytes;
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % alignment, 0U);
  std::vector<unsigned char> resident((size + page_bytes - 1) / page_bytes);
  ASSERT_EQ(mincore(buffer.data(), size, resident.data()), 0);
  EXPECT_TRUE(std::all_of(resident.begin(), resident.end(), [](auto page) { return page & 1U; }));
  EXPECT_TRUE(std::all_of(buffer.data(), buffer.data() + size,
                          [](std::byte value) { return value == std::byte{0}; }));
  std::fill_n(buffer.data(), size, std::byte{0xff});
}

INSTANTIATE_TEST_SUITE_P(Sizes, BufferSizes,
                         ::testing::Values(1, 4095, 4096, 4097, (2U << 20U) - 1, 2U << 20U,
                                           (2U << 20U) + 1, 5000001));

TEST(Buffer, OfNothingIsEmpty) {
  const Buffer none;
  const Buffer empty({}, 0);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(empty.view(Dtype::kF32).count, 0);
}

TEST(Buffer, MovesAndLeavesNothingBehind) {
  Buffer first({}, 100);
  std::byte* const data = first.data();
  Buffer second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): the promise under test
  EXPECT_EQ(first.size(), 0U);
  Buffer third({}, 5);
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.size(), 100U);
  EXPECT_EQ(second.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(third.view(Dtype::kBf16).count, 50);
}

TEST(Buffer, WithoutMemoryIsAnError) {
  EXPECT_THROW(Buffer({}, std::numeric_limits<std::size_t>::max()), Error);
  EXPECT_THROW(Buffer({}, std::size_t{1} << 60U), Error);
}

}  // namespace
}  // namespace hsdp
