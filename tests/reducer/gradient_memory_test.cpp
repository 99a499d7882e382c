// In its carry, each rank's slices and bucket rows lie where the layout says.
#include "hsdp/reducer/gradient_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "hsdp/comm/world.h"

namespace hsdp {
namespace {

// Parameters that share buckets, that fill several, that are empty, and whose rows do not divide
// evenly.
void expect_carry(Communicator& world, Layout kind, int shard_size) {
  const ReducerOptions options{.layout = kind, .bucket_bytes = 5000};
  reducer::ParameterTable table(options, 1);
  const std::vector<Shape> shapes{{5, 3}, {2049, 2, 2}, {0}, {}, {300, 3}, {3, 1000}, {1}};
  for (const Shape& shape : shapes) {
    table.add({.name = "w" + std::to_string(table.size()), .shape = shape});
  }
  const BucketLayout layout = table.make_layout(shard_size);
  for (int rank = 0; rank < shard_size; ++rank) {
    reducer::GradientMemory memory(table, layout, {rank}, {}, AccumulateOn::kDevice, {});
    memory.allocate_carry(world);
    for (int p = 0; p < layout.parameter_count(); ++p) {
      EXPECT_EQ(memory.slice_result(p).count, layout.slice(p, rank).count);
    }
    const auto floats = [](const TensorView& view) { return static_cast<float*>(view.data); };
    std::vector<const float*> used;
    for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
      const TensorView row = memory.bucket_carry(b);
      EXPECT_EQ(row.count, layout.rows(b).length(rank));
      if (!layout.goes_on(b)) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(row.data) % 64, 0U);
      }
      for (const ParameterRange& range : layout.ranges(b, rank)) {
        const TensorView slice = memory.slice_result(range.parameter);
        const float* const element = floats(row) + range.offset;
        EXPECT_EQ(element,
                  floats(slice) + range.flat_offset - layout.slice(range.parameter, rank).offset);
        for (std::int64_t i = 0; i < range.count; ++i) used.push_back(element + i);
      }
    }
    std::ranges::sort(used);
    EXPECT_EQ(std::ranges::adjacent_find(used), used.end()) << "two elements share memory";
    EXPECT_EQ(std::ssize(used), layout.shard_count(rank));
  }
}

TEST(Carry, HoldsSlicesWholeAndBucketsApart) {
  Communicator world = in_process_world(1).front();
  for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    for (const int shard_size : {1, 3, 8}) {
      SCOPED_TRACE(std::string(name(layout)) + ", ranks " + std::to_string(shard_size));
      expect_carry(world, layout, shard_size);
    }
  }
}

// Each rank has whole numbers, aligned to both of their parts, whatever lies around them.
TEST(Carry, NeverPartsAComplexNumber) {
  Communicator world = in_process_world(1).front();
  const std::vector<ParameterSpec> specs{
      {.name = "odd", .shape = {5}},
      {.name = "z", .shape = {7, 3, 2}, .is_complex = true},
      {.name = "one", .shape = {1}},
      {.name = "scalar", .shape = {2}, .is_complex = true},
      {.name = "long", .shape = {901, 2}, .is_complex = true},
      {.name = "wide", .shape = {5, 2}, .dtype = Dtype::kF64, .is_complex = true}};
  for (const Layout kind : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    for (const int shard_size : {1, 2, 3, 8}) {
      const ReducerOptions options{.layout = kind, .bucket_bytes = 1000};
      reducer::ParameterTable table(options, 1);
      for (const ParameterSpec& spec : specs) table.add(spec);
      const BucketLayout layout = table.make_layout(shard_size);
      for (int rank = 0; rank < shard_size; ++rank) {
        reducer::GradientMemory memory(table, layout, {rank}, {}, AccumulateOn::kDevice, {});
        memory.allocate_carry(world);
        for (int p = 0; p < layout.parameter_count(); ++p) {
          if (!specs[static_cast<std::size_t>(p)].is_complex) continue;
          const Slice slice = layout.slice(p, rank);
          EXPECT_EQ(slice.offset % 2, 0) << "parameter " << p << ", rank " << rank;
          EXPECT_EQ(slice.count % 2, 0) << "parameter " << p << ", rank " << rank;
          const TensorView carry = memory.slice_result(p);
          const auto number_bytes = 2 * size_bytes(carry.dtype);
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(carry.data) % number_bytes, 0U);
        }
      }
    }
  }
}

}  // namespace
}  // namespace hsdp
