#include "tests/support/wide_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>

#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/reducer.h"

namespace hsdp::test {
namespace {

// Sums of a few of these are exact in f64 but not in f32.
constexpr double kUnit = 0x1p-36;

struct Parameter {
  ParameterSpec spec;
  Shape strides;  // of its gradients
};

// 16-bit dtypes, f32 and f64 in turn, so that there are buckets of all three.
std::vector<Parameter> parameters() {
  return {{{.name = "wide", .shape = {13, 7}, .dtype = Dtype::kF64}, {}},
          {{.name = "bf16", .shape = {9}, .dtype = Dtype::kBf16, .reduce_dtype = Dtype::kF32}, {}},
          {{.name = "turned", .shape = {29, 37}, .dtype = Dtype::kF64}, {1, 29}},
          {{.name = "f32", .shape = {301}, .dtype = Dtype::kF32, .group = "late"}, {}},
          {{.name = "empty", .shape = {0}, .dtype = Dtype::kF64}, {}},
          {{.name = "cube", .shape = {3, 5, 7}, .dtype = Dtype::kF64, .group = "late"}, {1, 21, 3}},
          {{.name = "scalar", .shape = {}, .dtype = Dtype::kF64}, {}}};
}

bool is_wide(const ParameterSpec& spec) { return spec.dtype == Dtype::kF64; }

// Small integers; with f64, beside them values that f32 cannot hold.
std::vector<double> values_of(std::size_t parameter, std::size_t microbatch, int rank,
                              const ParameterSpec& spec) {
  std::mt19937 random(static_cast<unsigned>(1000 * parameter + 100 * microbatch) +
                      static_cast<unsigned>(rank));
  std::vector<double> values(static_cast<std::size_t>(element_count(spec.shape)));
  for (double& value : values) {
    value = static_cast<double>(random() % 13) - 6.0;
    if (is_wide(spec)) value += static_cast<double>(random() % (1U << 30)) * kUnit;
  }
  return values;
}

// The bytes of a gradient, laid out by the parameter's strides.
std::vector<std::byte> stored(const std::vector<double>& values, const Parameter& parameter) {
  const Shape& shape = parameter.spec.shape;
  const std::size_t bytes = size_bytes(parameter.spec.dtype);
  std::vector<std::byte> memory(values.size() * bytes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    auto place = static_cast<std::int64_t>(i);
    if (!parameter.strides.empty()) {
      auto rest = static_cast<std::int64_t>(i);
      place = 0;
      for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) {
        place += rest % shape[d] * parameter.strides[d];
      }
    }
    const auto narrow = static_cast<float>(values[i]);
    const Bf16 half = to_bf16(narrow);
    const void* const from = is_wide(parameter.spec) ? static_cast<const void*>(&values[i])
                             : parameter.spec.dtype == Dtype::kF32
                                 ? static_cast<const void*>(&narrow)
                                 : &half;
    std::memcpy(memory.data() + static_cast<std::size_t>(place) * bytes, from, bytes);
  }
  return memory;
}

// The sum of all ranks' microbatches up to `end`.
std::vector<double> sums_of(std::size_t parameter, std::size_t end, std::span<const int> ranks,
                            const ParameterSpec& spec) {
  std::vector<double> sums(static_cast<std::size_t>(element_count(spec.shape)));
  for (std::size_t m = 0; m < end; ++m) {
    for (const int rank : ranks) {
      const std::vector<double> values = values_of(parameter, m, rank, spec);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
    }
  }
  return sums;
}

double divided(double sum, double divisor, const ParameterSpec& spec) {
  return is_wide(spec) ? sum / divisor : static_cast<float>(sum) / static_cast<float>(divisor);
}

class WideStep {
 public:
  WideStep(const Mesh& mesh, const ReducerOptions& options,
           std::vector<std::optional<Sync>> schedule)
      : mesh_(mesh),
        reducer_(mesh, options),
        has_partials_(options.shard_over == ShardOver::kShard),
        schedule_(std::move(schedule)),
        stream_(mesh.device().type == DeviceType::kHost ? Stream::inline_host()
                                                        : Stream::create(mesh.device(), "caller")) {
    for (const Parameter& parameter : parameters_) reducer_.register_parameter(parameter.spec);
    reducer_.set_stream(stream_);
    for (int rank = 0; rank < mesh.size(); ++rank) world_.push_back(rank);
    for (int s = 0; s < mesh.shard_group().size(); ++s) {
      own_.push_back(mesh.shard_group().world_ranks()[static_cast<std::size_t>(s)]);
    }
  }

  void run() {
    // f s is not representable in f32.
    const double factor = 3.0 * mesh_.size() + 0x1p-30;
    reducer_.set_gradient_divide_factor(factor);
    for (std::size_t m = 0; m < schedule_.size(); ++m) {
      run_microbatch(m);
      if (has_partials_ && schedule_[m] == Sync::kShard && m == 0) expect_partial(m + 1, factor);
    }
    EXPECT_FALSE(reducer_.found_inf());
    std::vector<std::vector<double>> means;
    double squares = 0.0;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const ParameterSpec& spec = parameters_[p].spec;
      means.push_back(sums_of(p, schedule_.size(), world_, spec));
      for (double& mean : means.back()) {
        mean = divided(mean, factor, spec);
        squares += mean * mean;
      }
      expect_slice(spec, reducer_.shard(spec.name), means.back(), "shard");
    }
    expect_gathered(means);
    EXPECT_NEAR(reducer_.grad_norm(), std::sqrt(squares), 1e-12 * std::sqrt(squares));
    expect_clipped(means);
    poison_ = true;
    run_microbatch(schedule_.size() - 1);
    EXPECT_TRUE(reducer_.found_inf());
  }

 private:
  void run_microbatch(std::size_t m) {
    std::vector<std::vector<std::byte>> memory;
    reducer_.set_requires_all_reduce(schedule_[m].has_value(), "late");
    Microbatch open(reducer_, {.sync = schedule_[m]});
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const Parameter& parameter = parameters_[p];
      std::vector<double> values = values_of(p, m, mesh_.rank(), parameter.spec);
      if (poison_ && parameter.spec.name == "turned" && mesh_.rank() == 0) values[700] = HUGE_VAL;
      memory.push_back(stored(values, parameter));
      reducer_.gradient_ready(parameter.spec.name,
                              {memory.back().data(), parameter.spec.dtype, mesh_.device(),
                               parameter.spec.shape, parameter.strides});
    }
    open.end();
    stream_.wait(reducer_.packed());
    stream_.synchronize();
  }

  // The elements of `view`, which may be in device memory.
  std::vector<double> read(const TensorView& view) {
    std::vector<std::byte> bytes(view.size_in_bytes());
    copy_bytes(bytes.data(), view.data, bytes.size(), stream_);
    stream_.synchronize();
    std::vector<double> values(static_cast<std::size_t>(view.count));
    for (std::size_t i = 0; i < values.size(); ++i) {
      float narrow = 0.0F;
      if (view.dtype == Dtype::kF64) {
        std::memcpy(&values[i], bytes.data() + 8 * i, 8);
      } else {
        std::memcpy(&narrow, bytes.data() + 4 * i, 4);
        values[i] = narrow;
      }
    }
    return values;
  }

  void expect_slice(const ParameterSpec& spec, const TensorView& got,
                    const std::vector<double>& whole, const std::string& what) {
    ASSERT_EQ(got.dtype, is_wide(spec) ? Dtype::kF64 : Dtype::kF32) << spec.name;
    const Slice slice = reducer_.slice(spec.name);
    const auto want = std::span(whole).subspan(static_cast<std::size_t>(slice.offset),
                                               static_cast<std::size_t>(slice.count));
    const std::vector<double> values = read(got);
    EXPECT_TRUE(std::ranges::equal(values, want))
        << what << " of " << spec.name << " on rank " << mesh_.rank();
  }

  void expect_partial(std::size_t microbatches, double factor) {
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const ParameterSpec& spec = parameters_[p].spec;
      std::vector<double> want = sums_of(p, microbatches, own_, spec);
      for (double& value : want) value = divided(value, factor, spec);
      const Dtype dtype = is_wide(spec) ? Dtype::kF64 : Dtype::kF32;
      const std::int64_t count = reducer_.slice(spec.name).count;
      const Buffer out(mesh_.device(), static_cast<std::size_t>(count) * size_bytes(dtype));
      const TensorView view{out.data(), count, dtype, mesh_.device()};
      reducer_.partial_shard(spec.name, view);
      expect_slice(spec, view, want, "partial shard");
    }
  }

  void expect_gathered(const std::vector<std::vector<double>>& means) {
    std::vector<Buffer> memory;
    std::vector<NamedArray> arrays;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const ParameterSpec& spec = parameters_[p].spec;
      const Dtype dtype = is_wide(spec) ? Dtype::kF64 : Dtype::kF32;
      const std::int64_t count = element_count(spec.shape);
      memory.emplace_back(mesh_.device(), static_cast<std::size_t>(count) * size_bytes(dtype));
      arrays.push_back({spec.name, {memory.back().data(), count, dtype, mesh_.device()}});
    }
    reducer_.gather_gradients(arrays);
    for (std::size_t p = 0; p < means.size(); ++p) {
      EXPECT_EQ(read(arrays[p].array), means[p]) << "gathered " << parameters_[p].spec.name;
    }
    std::vector<float> narrow(means[0].size());
    const NamedArray refused[] = {
        {"wide", {narrow.data(), std::ssize(narrow), Dtype::kF32, mesh_.device()}}};
    EXPECT_THROW(reducer_.gather_gradients(refused), UsageError);
  }

  void expect_clipped(std::vector<std::vector<double>>& means) {
    const double max_norm = reducer_.grad_norm() / 3.0;
    const double factor = max_norm / (reducer_.clip_grad_norm(max_norm) + 1e-6);
    for (std::size_t p = 0; p < means.size(); ++p) {
      const ParameterSpec& spec = parameters_[p].spec;
      for (double& mean : means[p]) {
        mean =
            is_wide(spec) ? mean * factor : static_cast<float>(mean) * static_cast<float>(factor);
      }
      expect_slice(spec, reducer_.shard(spec.name), means[p], "clipped shard");
    }
  }

  const Mesh& mesh_;
  std::vector<Parameter> parameters_ = parameters();
  Reducer reducer_;
  bool has_partials_;
  std::vector<std::optional<Sync>> schedule_;
  Stream stream_;
  bool poison_ = false;
  std::vector<int> world_;
  std::vector<int> own_;  // this rank's, of its shard group
};

}  // namespace

void expect_wide_step(const Mesh& mesh, const ReducerOptions& options,
                      const std::vector<std::optional<Sync>>& schedule) {
  WideStep(mesh, options, schedule).run();
}

}  // namespace hsdp::test
