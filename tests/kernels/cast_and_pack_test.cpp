#include "hsdp/kernels/cast_and_pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "caller_environment.h"
#include "hsdp/error.h"
#include "kernel_test_data.h"

namespace hsdp::kernels {
namespace {

using CastAndPackOn = OnTarget;

// A gradient that owns its memory. With negative strides the data start inside the memory.
struct Gradient {
  Gradient(Dtype dtype, Shape shape, Shape strides, std::mt19937& random)
      : memory(dtype, extent_of(shape, strides), random() % 8) {
    memory.fill(random);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < strides.size(); ++i) {
      if (strides[i] < 0) first -= strides[i] * std::max<std::int64_t>(shape[i] - 1, 0);
    }
    view.data = memory.data() + first * static_cast<std::int64_t>(size_bytes(dtype));
    view.dtype = dtype;
    view.shape = std::move(shape);
    view.strides = std::move(strides);
  }

  static std::int64_t extent_of(const Shape& shape, const Shape& strides) {
    if (strides.empty()) return element_count(shape);
    std::int64_t extent = 1;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      extent += std::abs(strides[i]) * std::max<std::int64_t>(shape[i] - 1, 0);
    }
    return extent;
  }

  Row memory;
  StridedView view;
};

struct Options {
  bool has_add = false;
  Dtype add_dtype = Dtype::kF32;
  bool has_base = false;
  int exponent = 0;
  bool streaming_stores = false;
  bool in_place = false;           // `out` is `add`, which is f32
  bool spoils_the_kernel = false;  // else the reference runs in the spoilt environment
};

// Packs one window with the kernel and with the reference.
std::string check_window(const StridedView* gradient, std::int64_t begin, std::int64_t count,
                         Dtype out_dtype, const Options& options, std::mt19937& random) {
  Row add(options.add_dtype, count, random() % 40);
  add.fill(random);
  Row base(Dtype::kF32, count, random() % 40);
  base.fill(random);
  Row out = options.in_place ? add : Row(out_dtype, count, random() % 40);
  Row expected(out.dtype(), count, 0);
  CastAndPack args{.gradient = gradient,
                   .begin = begin,
                   .count = count,
                   .add = options.has_add ? add.data() : nullptr,
                   .add_dtype = options.add_dtype,
                   .base = options.has_base ? base.data() : nullptr,
                   .exponent = options.exponent,
                   .out_dtype = out.dtype(),
                   .out = expected.data(),
                   .streaming_stores = options.streaming_stores};
  run_in_environment(!options.spoils_the_kernel, [&] { cast_and_pack_reference(args); });
  args.out = out.data();
  if (options.in_place) args.add = args.out;
  run_in_environment(options.spoils_the_kernel, [&] { cast_and_pack(args); });
  return out.guards_hold() ? out.difference(expected) : "it wrote outside the output";
}

Options random_options(std::mt19937& random) {
  Options options;
  options.has_add = random() % 2 == 0;
  options.add_dtype = kGradientDtypes[random() % 3];
  options.has_base = random() % 3 == 0;
  options.exponent = random() % 2 == 0 ? 0 : 5;
  options.streaming_stores = random() % 2 == 0;
  options.in_place = options.has_add && options.add_dtype == Dtype::kF32 && random() % 2 == 0;
  options.spoils_the_kernel = random() % 2 == 0;
  return options;
}

// Strides of a dense tensor whose dimensions are in `order` in memory, outermost first.
Shape permuted_strides(const Shape& shape, const std::vector<std::size_t>& order) {
  Shape strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<std::int64_t>(shape[order[i]], 1);
  }
  return strides;
}

TEST_P(CastAndPackOn, ContiguousEqualsTheReferenceForEveryDtypeAndCount) {
  std::mt19937 random(1);
  for (const Dtype from : kGradientDtypes) {
    for (const Dtype to : kGradientDtypes) {
      for (std::int64_t count = 0; count < 150; ++count) {
        Gradient gradient(from, {count + 9}, {}, random);
        const auto begin = static_cast<std::int64_t>(random() % 10);
        ASSERT_EQ(check_window(&gradient.view, begin, count, to, random_options(random), random),
                  "")
            << name(from) << " to " << name(to) << ", " << count;
      }
    }
  }
}

TEST_P(CastAndPackOn, TheBaseComesLast) {
  const std::vector<float> ones(5000, 1.0F);
  std::vector<float> base(ones.size(), 0x1p24F);  // adding 1 is lost, adding 2 is not
  const StridedView gradient{ones.data(), Dtype::kF32, {}, {5000}, {}};
  cast_and_pack({.gradient = &gradient,
                 .count = gradient.count(),
                 .add = ones.data(),
                 .base = base.data(),
                 .out = base.data()});
  EXPECT_EQ(base, std::vector<float>(ones.size(), 0x1p24F + 2));
}

TEST_P(CastAndPackOn, AnyPermutationAndWindowEqualsTheReference) {
  std::mt19937 random(2);
  for (int repeat = 0; repeat < 600; ++repeat) {
    Shape shape(random() % 6);
    for (std::int64_t& extent : shape) {
      extent = 1 + static_cast<std::int64_t>(random() % (shape.size() > 3 ? 7 : 40));
    }
    if (!shape.empty() && random() % 16 == 0) shape[random() % shape.size()] = 0;
    std::vector<std::size_t> order(shape.size());
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), random);
    Shape strides = permuted_strides(shape, order);
    for (std::int64_t& stride : strides) {
      const auto kind = random() % 12;
      if (kind == 0) stride = -stride;
      if (kind == 1) stride = 0;
      if (kind == 2) stride *= 2;
    }
    Gradient gradient(kGradientDtypes[random() % 3], shape, strides, random);
    const std::int64_t total = gradient.view.count();
    std::int64_t begin = 0;
    std::int64_t count = total;
    if (random() % 3 != 0 && total > 0) {
      begin = static_cast<std::int64_t>(random()) % (total + 1);
      count = static_cast<std::int64_t>(random()) % (total - begin + 1);
    }
    ASSERT_EQ(check_window(&gradient.view, begin, count, kGradientDtypes[random() % 3],
                           random_options(random), random),
              "")
        << to_string(shape) << " strides " << to_string(strides) << ", " << count << " from "
        << begin;
  }
}

TEST_P(CastAndPackOn, LargeTransposesEqualTheReference) {
  std::mt19937 random(3);
  for (const Dtype dtype : kGradientDtypes) {
    Gradient matrix(dtype, {301, 523}, {1, 301}, random);
    ASSERT_EQ(check_window(&matrix.view, 0, 301 * 523, Dtype::kBf16, {}, random), "");
    ASSERT_EQ(check_window(&matrix.view, 777, 100000, dtype, {}, random), "");
    // channels_last: (N, C, H, W) with C innermost in memory.
    Gradient image(dtype, {3, 70, 9, 11}, permuted_strides({3, 70, 9, 11}, {0, 2, 3, 1}), random);
    ASSERT_EQ(check_window(&image.view, 0, image.view.count(), dtype, {}, random), "");
    Gradient slices(dtype, {5, 3000}, {3100, 1}, random);
    ASSERT_EQ(check_window(&slices.view, 100, 14000, dtype, {.streaming_stores = true}, random),
              "");
  }
}

TEST_P(CastAndPackOn, ReadsRowMajorLogicalOrder) {
  // Element (i, j) of the transposed view holds 10 i + j.
  std::vector<float> memory(60);
  for (std::size_t i = 0; i < 6; ++i) {
    for (std::size_t j = 0; j < 10; ++j) memory[j * 6 + i] = static_cast<float>(10 * i + j);
  }
  const StridedView view{memory.data(), Dtype::kF32, {}, {6, 10}, {1, 6}};
  std::vector<float> out(37);
  cast_and_pack({.gradient = &view, .begin = 13, .count = 37, .out = out.data()});
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], static_cast<float>(13 + i));
}

TEST_P(CastAndPackOn, AMissingGradientIsZeros) {
  std::mt19937 random(4);
  for (const Dtype to : kGradientDtypes) {
    for (const bool has_add : {false, true}) {
      const Options options{.has_add = has_add, .add_dtype = to, .exponent = 2};
      ASSERT_EQ(check_window(nullptr, 0, 333, to, options, random), "");
    }
    Row out(to, 100, 1);
    cast_and_pack({.count = 100, .out_dtype = to, .out = out.data()});
    for (std::size_t i = 0; i < 100; ++i) {
      ASSERT_EQ(out.at(i), 0.0F);
      ASSERT_FALSE(std::signbit(out.at(i)));
    }
  }
}

TEST_P(CastAndPackOn, RoundsOnceAfterTheScaledSum) {
  const std::vector<float> gradient(70, 1.0F);
  const std::vector<float> add(70, 256.0F);
  const StridedView view{gradient.data(), Dtype::kF32, {}, {70}, {}};
  Row out(Dtype::kBf16, 70, 0);
  cast_and_pack({.gradient = &view,
                 .count = 70,
                 .add = add.data(),
                 .exponent = 3,
                 .out_dtype = Dtype::kBf16,
                 .out = out.data()});
  for (std::size_t i = 0; i < 70; ++i) ASSERT_EQ(out.at(i), 32.0F);  // 257 / 8, a tie, to even
}

TEST_P(CastAndPackOn, RefusesWhatItCannotDo) {
  float value = 0.0F;
  const StridedView view{&value, Dtype::kF32, {}, {3, 4}, {}};
  const StridedView few_strides{&value, Dtype::kF32, {}, {3, 4}, {1}};
  const StridedView integers{&value, Dtype::kI64, {}, {3, 4}, {}};
  EXPECT_NO_THROW(cast_and_pack({.gradient = &view, .out = &value}));
  const CastAndPack wrong[] = {
      {.gradient = &view, .count = 13, .out = &value},
      {.gradient = &view, .begin = 13, .out = &value},
      {.gradient = &view, .begin = -1, .out = &value},
      {.gradient = &view, .out_dtype = Dtype::kF64, .out = &value},
      {.gradient = &few_strides, .out = &value},
      {.gradient = &integers, .out = &value},
  };
  for (const CastAndPack& args : wrong) {
    EXPECT_THROW(cast_and_pack(args), UsageError) << "row " << &args - wrong;
    EXPECT_THROW(cast_and_pack_reference(args), UsageError) << "row " << &args - wrong;
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, CastAndPackOn, ::testing::ValuesIn(simd_targets()), target_name);

}  // namespace
}  // namespace hsdp::kernels
