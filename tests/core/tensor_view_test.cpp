#include "hsdp/tensor_view.h"

#include <gtest/gtest.h>

#include <array>

namespace hsdp {
namespace {

TEST(TensorView, SlicesByElements) {
  std::array<std::uint16_t, 10> data{};
  const TensorView view{data.data(), 10, Dtype::kBf16, {}};
  EXPECT_EQ(view.size_in_bytes(), 20U);
  const TensorView slice = view.slice(3, 4);
  EXPECT_EQ(slice.data, data.data() + 3);
  EXPECT_EQ(slice.count, 4);
  EXPECT_EQ(slice.dtype, Dtype::kBf16);
  const ConstTensorView read_only = slice;
  EXPECT_EQ(read_only.slice(1, 2).data, data.data() + 4);
  EXPECT_EQ(read_only.size_in_bytes(), 8U);
  EXPECT_EQ(view.slice(10, 0).count, 0);
}

TEST(TensorView, NamesDevicesShapesAndViews) {
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceType::kCuda, 3}), "cuda:3");
  EXPECT_EQ(to_string(Shape{}), "()");
  EXPECT_EQ(to_string(Shape{7}), "(7,)");
  EXPECT_EQ(to_string(Shape{5, 3}), "(5, 3)");
  EXPECT_EQ(to_string(TensorView{nullptr, 7, Dtype::kBf16, {DeviceType::kCuda, 1}}),
            "7 bf16 on cuda:1");
}

TEST(TensorView, CountsElements) {
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({0}), 0);
  EXPECT_EQ(element_count({2049, 2, 2}), 8196);
  EXPECT_EQ(element_count({4, 0, 3}), 0);
}

TEST(StridedView, KnowsWhatIsContiguous) {
  const auto contiguous = [](Shape shape, Shape strides) {
    return StridedView{nullptr, Dtype::kF32, {}, std::move(shape), std::move(strides)}
        .is_contiguous();
  };
  EXPECT_TRUE(contiguous({2, 3}, {}));
  EXPECT_TRUE(contiguous({2, 3}, {3, 1}));
  EXPECT_FALSE(contiguous({2, 3}, {1, 2}));
  EXPECT_FALSE(contiguous({2, 3}, {4, 1}));
  EXPECT_FALSE(contiguous({6}, {2}));
  EXPECT_FALSE(contiguous({6}, {0}));
  EXPECT_TRUE(contiguous({}, {}));
  EXPECT_TRUE(contiguous({1, 6, 1}, {99, 1, -5}));  // strides of dimensions of size 1 do not matter
  EXPECT_TRUE(contiguous({0, 3}, {7, 9}));          // nor does any stride of an empty tensor
}

}  // namespace
}  // namespace hsdp
