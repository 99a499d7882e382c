#include "loco_steps.h"

#include <algorithm>
#include <limits>

#include "tests/kernels/hostile_value.h"

namespace hsdp::quant {
namespace {

float some_value(std::mt19937& random, bool hostile) {
  if (hostile) return kernels::hostile_value(random);
  return std::normal_distribution<float>()(random) *
         std::exp2(static_cast<float>(random() % 20) - 15.0F);
}

}  // namespace

void cut_into_buckets(Configuration& made, std::mt19937& random) {
  std::map<int, std::vector<ParameterRange>> buckets;
  for (std::size_t p = 0; p < made.counts.size(); ++p) {
    const bool apart = !made.mixed && is_excluded(made.options, made.names[p]);
    const std::int64_t cut =
        std::min(made.counts[p], static_cast<std::int64_t>(random() % 4) * made.options.group_size);
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, cut}, {cut, made.counts[p]}}) {
      if (begin == end) continue;
      std::vector<ParameterRange>& bucket =
          buckets[(apart ? 10 : 0) + static_cast<int>(random() % 3)];
      std::int64_t offset = static_cast<std::int64_t>(random() % 3);  // a gap
      if (!bucket.empty()) offset += bucket.back().offset + bucket.back().count;
      bucket.push_back({static_cast<int>(p), offset, end - begin, begin});
    }
  }
  made.buckets.clear();
  for (auto& [number, ranges] : buckets) made.buckets.push_back(std::move(ranges));
}

Configuration random_configuration(std::mt19937& random) {
  Configuration made;
  LocoOptions& options = made.options;
  options.bits = one_of(random, std::vector{4, 8});
  options.group_size = one_of(random, std::vector{32, 64, 64, 96, 128, 512});
  options.scale_dtype = one_of(random, std::vector{Dtype::kBf16, Dtype::kF32});
  options.err_beta = one_of(random, std::vector{0.0, 0.5, 0.8, 0.95});
  options.reset_T = one_of(random, std::vector<std::int64_t>{0, 1, 2, 3, 1024});
  options.error_dtype = one_of(random, std::vector{Dtype::kU8, Dtype::kF32});
  options.gather =
      one_of(random, std::vector<std::optional<Code>>{{}, Code::kInt4, Code::kInt8, Code::kBf16});
  options.error_feedback = random() % 6 != 0;
  options.warmup_steps = one_of(random, std::vector<std::int64_t>{0, 0, 0, 1, 2});
  options.stochastic_error = options.error_dtype == Dtype::kU8 && random() % 3 == 0;
  options.seed = random();
  if (random() % 3 == 0) options.exclude = {"*norm*"};
  made.mixed = random() % 2 == 0;
  made.replicas = 2 + static_cast<int>(random() % 7);
  made.steps = 3 + static_cast<int>(random() % 4);
  const std::size_t count = 1 + random() % 5;
  for (std::size_t p = 0; p < count; ++p) {
    const bool is_norm = p == 0;  // one at least, for the pattern
    made.names.push_back((is_norm ? "norm." : "layer.") + std::to_string(p));
    made.counts.push_back(
        static_cast<std::int64_t>(1 + random() % (random() % 2 == 0 ? 40 : 3000)));
  }
  cut_into_buckets(made, random);
  return made;
}

std::vector<Step> random_steps(const Configuration& made, std::mt19937& random) {
  std::vector<Step> steps(static_cast<std::size_t>(made.steps));
  for (Step& step : steps) {
    step.drops = random() % 6 == 0;
    if (random() % 5 == 0) step.scale = 0.3F;
    const bool hostile = random() % 8 == 0;
    const float divisor = one_of(random, std::vector{1.0F, 4.0F, 3.0F, -0.7F, 1024.0F});
    step.reductions.resize(1 + random() % 2);
    for (Reduction& reduction : step.reductions) {
      reduction.divisor = divisor;
      reduction.sums.resize(static_cast<std::size_t>(made.replicas));
      for (std::vector<Floats>& sums : reduction.sums) {
        for (const std::int64_t count : made.counts) {
          sums.emplace_back(static_cast<std::size_t>(count));
          for (float& value : sums.back()) value = some_value(random, hostile);
        }
      }
    }
  }
  return steps;
}

HopPlan plan_of(const Configuration& made) {
  HopPlan plan;
  for (std::size_t p = 0; p < made.names.size(); ++p) {
    plan.parameters.push_back({made.names[p], {made.counts[p]}});
  }
  plan.ranges = made.buckets;
  plan.wires.assign(made.buckets.size(), Dtype::kF32);
  plan.replicate_size = made.replicas;
  return plan;
}

std::vector<Floats> run_step(LocoHop& hop, const Configuration& made, const Step& step, int replica,
                             std::atomic<std::uint32_t>& nonfinite) {
  std::vector<Floats> sums;
  for (const std::int64_t count : made.counts) sums.emplace_back(static_cast<std::size_t>(count));
  Stream stream = Stream::inline_host();
  for (std::size_t k = 0; k < step.reductions.size(); ++k) {
    const Reduction& reduction = step.reductions[k];
    std::vector<Floats> memory;
    std::vector<Event> events;
    for (std::size_t b = 0; b < made.buckets.size(); ++b) {
      const std::vector<ParameterRange>& ranges = made.buckets[b];
      memory.emplace_back(static_cast<std::size_t>(ranges.back().offset + ranges.back().count),
                          7.0F);
      for (const ParameterRange& range : ranges) {
        const Floats& given =
            reduction
                .sums[static_cast<std::size_t>(replica)][static_cast<std::size_t>(range.parameter)];
        std::copy_n(given.begin() + range.flat_offset, range.count,
                    memory.back().begin() + range.offset);
      }
    }
    for (std::size_t b = 0; b < made.buckets.size(); ++b) {  // all in flight together
      const int number = static_cast<int>(b);
      HopBucket bucket;
      bucket.bucket = number;
      bucket.data = {memory[b].data(), std::ssize(memory[b]), Dtype::kF32, {}};
      bucket.arithmetic.mean_divisor = reduction.divisor;
      if (made.mixed) bucket.arithmetic.divisor = reduction.divisor;
      bucket.nonfinite = &nonfinite;
      if (k == 0) static_cast<void>(hop.means(number, reduction.divisor));
      events.push_back(hop.reduce(bucket, stream));
    }
    for (std::size_t b = 0; b < made.buckets.size(); ++b) {
      events[b].wait();
      for (const ParameterRange& range : made.buckets[b]) {
        Floats& sum = sums[static_cast<std::size_t>(range.parameter)];
        for (std::int64_t i = 0; i < range.count; ++i) {
          const float value = memory[b][static_cast<std::size_t>(range.offset + i)];
          float& place = sum[static_cast<std::size_t>(range.flat_offset + i)];
          place = k == 0 ? value : place + value;
        }
      }
    }
  }
  return sums;
}

}  // namespace hsdp::quant
