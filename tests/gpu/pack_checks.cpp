#include <algorithm>
#include <deque>
#include <numeric>

#include "check.h"
#include "device_row.h"
#include "hsdp/device/flag.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/pack_queue.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::gpu {
namespace {

using kernels::CastAndPack;

// A gradient that owns its memory. With negative strides the data start inside the memory.
struct Gradient {
  Gradient(Dtype dtype, const Shape& shape, const Shape& strides, std::mt19937& random,
           const Stream& stream)
      : memory(dtype, extent_of(shape, strides), random() % 8, stream) {
    memory.fill(random);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < strides.size(); ++i) {
      if (strides[i] < 0) first -= strides[i] * std::max<std::int64_t>(shape[i] - 1, 0);
    }
    const std::int64_t offset = first * static_cast<std::int64_t>(size_bytes(dtype));
    view = {memory.data() + offset, dtype, stream.device(), shape, strides};
    host_view = {memory.host() + offset, dtype, {}, shape, strides};
  }

  static std::int64_t extent_of(const Shape& shape, const Shape& strides) {
    if (strides.empty()) return element_count(shape);
    std::int64_t extent = 1;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      extent += std::abs(strides[i]) * std::max<std::int64_t>(shape[i] - 1, 0);
    }
    return extent;
  }

  DeviceRow memory;
  StridedView view;
  StridedView host_view;
};

struct Window {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// One window of `gradient`, which must outlive the case; nullptr means zeros.
class PackCase {
 public:
  PackCase(const Gradient* gradient, const Window& window, Dtype out_dtype, std::mt19937& random,
           const Stream& stream)
      : gradient_(gradient),
        window_(window),
        out_(out_dtype, window.count, random() % 16, stream),
        expected_(out_dtype, window.count, 0, stream),
        is_in_place_(random() % 4 == 0),
        add_(is_in_place_ ? out_dtype : kGradientDtypes[random() % 3], window.count, random() % 16,
             stream),
        has_add_(is_in_place_ || random() % 2 == 0),
        base_(Dtype::kF32, window.count, random() % 16, stream),
        has_base_(random() % 3 == 0),
        exponent_(random() % 2 == 0 ? 0 : 5) {
    add_.fill(random);
    base_.fill(random);
    if (is_in_place_) out_.copy_from(add_);
    CastAndPack args = arguments();
    args.gradient = gradient_ == nullptr ? nullptr : &gradient_->host_view;
    args.add = has_add_ ? add_.host() : nullptr;
    args.base = has_base_ ? base_.host() : nullptr;
    args.out = expected_.host();
    cast_and_pack_reference(args);
  }

  [[nodiscard]] CastAndPack on_device() {
    CastAndPack args = arguments();
    args.gradient = gradient_ == nullptr ? nullptr : &gradient_->view;
    if (has_add_) args.add = is_in_place_ ? out_.data() : add_.data();
    if (has_base_) args.base = base_.data();
    args.out = out_.data();
    return args;
  }

  // Compares what the device packed with the scalar definition.
  [[nodiscard]] std::string difference() {
    const std::string found = out_.difference(expected_);
    if (found.empty()) return {};
    return found +
           (gradient_ == nullptr ? std::string(" of zeros")
                                 : " of shape " + to_string(gradient_->view.shape) + " strides " +
                                       to_string(gradient_->view.strides)) +
           ", window " + std::to_string(window_.begin) + " + " + std::to_string(window_.count) +
           ", " + std::string(name(out_.dtype()));
  }

 private:
  [[nodiscard]] CastAndPack arguments() const {
    return {.begin = window_.begin,
            .count = window_.count,
            .add_dtype = add_.dtype(),
            .exponent = exponent_,
            .out_dtype = out_.dtype()};
  }

  const Gradient* gradient_;
  Window window_;
  DeviceRow out_;
  DeviceRow expected_;
  bool is_in_place_;
  DeviceRow add_;
  bool has_add_;
  DeviceRow base_;
  bool has_base_;
  int exponent_;
};

std::string check_window(const Gradient* gradient, const Window& window, Dtype out_dtype,
                         std::mt19937& random, const Stream& stream) {
  PackCase one(gradient, window, out_dtype, random, stream);
  cast_and_pack(one.on_device(), stream);
  return one.difference();
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

std::string check_contiguous(const Stream& stream) {
  std::mt19937 random(1);
  for (const Dtype from : kGradientDtypes) {
    for (const Dtype to : kGradientDtypes) {
      for (std::int64_t count = 0; count < 80; ++count) {
        const Gradient gradient(from, {count + 9}, {}, random, stream);
        const auto begin = static_cast<std::int64_t>(random() % 10);
        const std::string found = check_window(&gradient, {begin, count}, to, random, stream);
        if (!found.empty()) return found;
      }
    }
  }
  return {};
}

Gradient random_gradient(std::mt19937& random, const Stream& stream) {
  Shape shape(random() % 6);
  for (std::int64_t& extent : shape) {
    extent = 1 + static_cast<std::int64_t>(random() % (shape.size() > 3 ? 7 : 40));
  }
  if (!shape.empty() && random() % 4 == 0) {
    shape[random() % shape.size()] = 60 + static_cast<std::int64_t>(random() % 90);
  }
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
  return {kGradientDtypes[random() % 3], shape, strides, random, stream};
}

std::string check_permutations(int repeats, const Stream& stream) {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const Gradient gradient = random_gradient(random, stream);
    const std::int64_t total = gradient.view.count();
    Window window{0, total};
    if (random() % 3 != 0) {
      window.begin = static_cast<std::int64_t>(random()) % (total + 1);
      window.count = static_cast<std::int64_t>(random()) % (total - window.begin + 1);
    }
    const std::string found =
        check_window(&gradient, window, kGradientDtypes[random() % 3], random, stream);
    if (!found.empty()) return found;
  }
  return {};
}

// Packs windows of every kind together, more than one launch takes.
std::string check_queue(const Stream& stream) {
  std::mt19937 random(6);
  std::deque<Gradient> gradients;
  std::deque<PackCase> cases;
  kernels::PackQueue queue(stream.device());
  for (int i = 0; i < 1500; ++i) {
    const Gradient* gradient = nullptr;
    Window window{0, static_cast<std::int64_t>(random() % 700)};
    if (i == 700) window.count = 3 << 18;  // many blocks; the others need one
    if (i % 10 != 0) {
      gradient = i % 5 == 0
                     ? &gradients.emplace_back(random_gradient(random, stream))
                     : &gradients.emplace_back(kGradientDtypes[random() % 3],
                                               Shape{window.count + 5}, Shape{}, random, stream);
      if (i % 5 == 0) window.count = gradient->view.count();
    }
    PackCase& one =
        cases.emplace_back(gradient, window, kGradientDtypes[random() % 3], random, stream);
    queue.add(one.on_device());
  }
  queue.launch(stream);
  if (!queue.empty()) return "the queue is not empty after its launch";
  for (PackCase& one : cases) {
    if (std::string found = one.difference(); !found.empty()) return found;
  }
  return {};
}

std::string check_large(std::int64_t scale, const Stream& stream) {
  std::mt19937 random(4);
  for (const Dtype dtype : kGradientDtypes) {
    const std::vector<std::pair<Shape, Shape>> tensors{
        {{301 * scale, 523}, {1, 301 * scale}},
        {{3 * scale, 70, 9, 11}, permuted_strides({3 * scale, 70, 9, 11}, {0, 2, 3, 1})},
        {{40 * scale, 64, 3, 3}, permuted_strides({40 * scale, 64, 3, 3}, {0, 2, 3, 1})},
        {{2, 3, 71 * scale, 67}, permuted_strides({2, 3, 71 * scale, 67}, {0, 2, 3, 1})},
        {{5 * scale, 3000}, {3100, 1}},
        {{50001 * scale}, {2}},
        {{150001 * scale}, {}}};
    for (const auto& [shape, strides] : tensors) {
      const Gradient gradient(dtype, shape, strides, random, stream);
      const std::int64_t total = gradient.view.count();
      for (const Window& window : {Window{0, total}, Window{777, total - 1555}}) {
        const std::string found =
            check_window(&gradient, window, kGradientDtypes[random() % 3], random, stream);
        if (!found.empty()) return found;
      }
    }
  }
  return {};
}

// `args` has the factors; the rest is filled in here.
std::string check_scaled(kernels::ScaleAndCast args, DeviceRow& in, DeviceRow& out,
                         const Stream& stream) {
  DeviceRow expected(out.dtype(), in.count(), 0, stream);
  std::atomic<std::uint32_t> flag = 0;
  const Flag device_flag = make_flag(stream.device());
  args.in = in.host();
  args.in_dtype = in.dtype();
  args.out = expected.host();
  args.out_dtype = out.dtype();
  args.count = in.count();
  args.nonfinite = &flag;
  scale_and_cast_reference(args);
  args.in = in.data();
  args.out = out.data();
  args.nonfinite = device_flag.get();
  scale_and_cast(args, stream);
  const std::string found = out.difference(expected);
  return found.empty() && *device_flag != flag ? "the non-finite flags differ" : found;
}

std::string check_scale(const Stream& stream) {
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 400; ++repeat) {
    const auto count = static_cast<std::int64_t>(random() % 5000);
    DeviceRow in(kGradientDtypes[random() % 3], count, random() % 16, stream);
    in.fill(random);
    DeviceRow out(kGradientDtypes[random() % 3], count, random() % 16, stream);
    kernels::ScaleAndCast args;
    args.exponent = static_cast<int>(random() % 20) - 10;
    args.divisor = random() % 2 == 0 ? 1.0F : 0.7F;
    args.multiplier = random() % 2 == 0 ? 1.0F : 1.3F;
    if (std::string found = check_scaled(args, in, out, stream); !found.empty()) return found;
  }
  return {};
}

// Checks conversions for which a GPU has instructions: of every 16-bit value, and of f32 values of
// every exponent.
std::string check_conversions(std::int64_t count, const Stream& stream) {
  std::mt19937 random(6);
  for (const Dtype half : {Dtype::kF16, Dtype::kBf16}) {
    DeviceRow halves(half, 65536, 0, stream);
    for (std::int64_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      std::memcpy(halves.host() + 2 * i, &bits, 2);
    }
    halves.upload();
    DeviceRow singles(Dtype::kF32, count, 0, stream);
    const auto step = static_cast<std::uint32_t>((std::int64_t{1} << 32) / count);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t bits =
          static_cast<std::uint32_t>(i) * step + static_cast<std::uint32_t>(random()) % step;
      std::memcpy(singles.host() + 4 * i, &bits, 4);
    }
    singles.upload();
    for (DeviceRow* const in : {&halves, &singles}) {
      DeviceRow out(in == &halves ? Dtype::kF32 : half, in->count(), 0, stream);
      const std::string found = check_scaled({}, *in, out, stream);
      if (!found.empty()) return std::string(name(half)) + ": " + found;
    }
  }
  return {};
}

}  // namespace

std::vector<Check> pack_checks(Effort effort) {
  const bool full = effort == Effort::kFull;
  return {
      {"cast-and-pack: contiguous, every dtype, count and alignment", check_contiguous},
      {"cast-and-pack: many gradients in one launch", check_queue},
      {"cast-and-pack: any strides and window",
       [full](const Stream& stream) { return check_permutations(full ? 2000 : 500, stream); }},
      {"cast-and-pack: large, transposed, channels_last",
       [full](const Stream& stream) { return check_large(full ? 8 : 1, stream); }},
      {"scale-and-cast: equals the scalar definition", check_scale},
      {"conversions: f16 and bf16 both ways",
       [full](const Stream& stream) {
         return check_conversions(std::int64_t{1} << (full ? 26 : 19), stream);
       }},
  };
}

}  // namespace hsdp::gpu
