// Every rank's slices and bucket rows lie in its carry where the layout's ranges say.
#include "hsdp/reducer/gradient_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/thread_ranks.h"

namespace hsdp {
namespace {

struct CarryCase {
  Layout layout = Layout::kFlat;
  int shard_size = 1;
};

class Carry : public testing::TestWithParam<CarryCase> {
 protected:
  // Joined and by itself in several buckets, empty, of rows that do not divide.
  Carry() : options_{.layout = GetParam().layout, .bucket_bytes = 5000}, table_(options_, 1) {
    const std::vector<Shape> shapes{{5, 3}, {2049, 2, 2}, {0}, {}, {300, 3}, {3, 1000}, {1}};
    for (const Shape& shape : shapes) {
      table_.add({.name = "w" + std::to_string(table_.size()), .shape = shape});
    }
  }

  ReducerOptions options_;
  reducer::ParameterTable table_;
};

TEST_P(Carry, HoldsSlicesWholeAndBucketsApart) {
  const BucketLayout layout = table_.make_layout(GetParam().shard_size);
  test::run_ranks(1, [&](Communicator& world) {
    for (int rank = 0; rank < GetParam().shard_size; ++rank) {
      reducer::GradientMemory memory(table_, layout, rank, {}, AccumulateOn::kDevice, {});
      memory.allocate_carry(world);
      for (int p = 0; p < layout.parameter_count(); ++p) {
        EXPECT_EQ(memory.slice_carry(p).count, layout.slice(p, rank).count);
      }
      std::vector<const float*> used;
      for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
        const TensorView row = memory.bucket_carry(b);
        EXPECT_EQ(row.count, layout.rows(b).length(rank));
        if (!layout.goes_on(b)) {
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(row.data) % 64, 0U);
        }
        for (const ParameterRange& range : layout.ranges(b, rank)) {
          const TensorView slice = memory.slice_carry(range.parameter);
          const float* const element = reducer::GradientMemory::floats(row) + range.offset;
          EXPECT_EQ(element, reducer::GradientMemory::floats(slice) + range.flat_offset -
                                 layout.slice(range.parameter, rank).offset);
          for (std::int64_t i = 0; i < range.count; ++i) used.push_back(element + i);
        }
      }
      std::ranges::sort(used);
      EXPECT_EQ(std::ranges::adjacent_find(used), used.end()) << "two elements share memory";
      EXPECT_EQ(std::ssize(used), layout.shard_count(rank));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, Carry,
                         testing::Values(CarryCase{Layout::kFlat, 1}, CarryCase{Layout::kFlat, 3},
                                         CarryCase{Layout::kFlat, 8}, CarryCase{Layout::kDim0, 1},
                                         CarryCase{Layout::kDim0, 3}, CarryCase{Layout::kDim0, 8},
                                         CarryCase{Layout::kWhole, 1}, CarryCase{Layout::kWhole, 3},
                                         CarryCase{Layout::kWhole, 8}),
                         [](const auto& chosen) {
                           return std::string(name(chosen.param.layout)) + "_" +
                                  std::to_string(chosen.param.shard_size) + "_ranks";
                         });

}  // namespace
}  // namespace hsdp
