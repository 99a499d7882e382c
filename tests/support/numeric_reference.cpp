#include "tests/support/numeric_reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

namespace hsdp::test {
namespace {

Values add(const Values& a, const Values& b) {
  Values sum(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
  return sum;
}

void add_to(std::optional<Values>& into, const Values& values) {
  into = into ? add(*into, values) : values;
}

Values times_power_of_two(Values values, int exponent) {
  for (float& value : values) value = std::ldexp(value, exponent);
  return values;
}

Values on_wire(Values values, Dtype dtype, int exponent) {
  for (float& value : values) value = round_to(dtype, std::ldexp(value, -exponent));
  return values;
}

Values sum_rows(const std::vector<Values>& rows) {
  Values total = rows.front();
  for (std::size_t r = 1; r < rows.size(); ++r) total = add(total, rows[r]);
  return total;
}

Values divided(Values values, double factor, double loss_scale) {
  const auto divisor = static_cast<float>(factor * loss_scale);
  for (float& value : values) value /= divisor;
  return values;
}

// All ranks of one parameter, between two microbatches.
class Simulation {
 public:
  Simulation(const ReferenceStep& step, std::size_t count)
      : step_(step),
        count_(count),
        local_(static_cast<std::size_t>(step.replicate * step.shard)),
        carry_(static_cast<std::size_t>(step.replicate)) {}

  using RankGradients = std::vector<std::optional<Values>>;

  void microbatch(const RankGradients& fresh, Sync sync) {
    if (sync == Sync::kNone) {
      accumulate(fresh);
    } else {
      reduce_scatter(&fresh);
    }
    if (sync == Sync::kAll) replica_hop();
  }

  void finish() {
    if (local_count_ > 0) reduce_scatter(nullptr);
    if (carry_[0]) replica_hop();
  }

  [[nodiscard]] const Values& total() const { return *total_; }
  [[nodiscard]] const std::optional<Values>& carry(int replica) const {
    return carry_[static_cast<std::size_t>(replica)];
  }

 private:
  [[nodiscard]] Values gradient(const RankGradients& fresh, std::size_t rank) const {
    return fresh[rank] ? *fresh[rank] : Values(count_, 0.0F);
  }

  void accumulate(const RankGradients& fresh) {
    for (std::size_t rank = 0; rank < local_.size(); ++rank) {
      add_to(local_[rank], gradient(fresh, rank));
      if (step_.accumulate_dtype == AccumulateDtype::kParam) {
        local_[rank] = on_wire(*local_[rank], step_.gradient_dtype, 0);
      }
    }
    ++local_count_;
  }

  void reduce_scatter(const RankGradients* fresh) {
    const int packed_count = local_count_ + (fresh == nullptr ? 0 : 1);
    const int j = step_.reduce_dtype == Dtype::kF16 ? power_of_two_above(packed_count) : 0;
    const auto shard_size = static_cast<std::size_t>(step_.shard);
    for (std::size_t replica = 0; replica < carry_.size(); ++replica) {
      std::vector<Values> rows;
      for (std::size_t r = 0; r < shard_size; ++r) {
        const std::size_t rank = replica * shard_size + r;
        std::optional<Values> row = std::exchange(local_[rank], std::nullopt);
        if (fresh != nullptr) add_to(row, gradient(*fresh, rank));
        // A group of one sends nothing and therefore rounds nothing.
        if (shard_size > 1) row = times_power_of_two(on_wire(*row, step_.reduce_dtype, j), j);
        rows.push_back(*row);
      }
      add_to(carry_[replica], sum_rows(rows));
    }
    carry_count_ += packed_count;
    local_count_ = 0;
  }

  void replica_hop() {
    const bool f16 = step_.replica_dtype == Dtype::kF16;
    const int k = f16 ? power_of_two_above(step_.shard * carry_count_) : 0;
    const int total_k = f16 ? power_of_two_above(step_.shard * step_.replicate * carry_count_) : 0;
    std::vector<Values> rows;
    for (std::optional<Values>& carry : carry_) {
      const Values sum = *std::exchange(carry, std::nullopt);
      rows.push_back(step_.replicate > 1 ? on_wire(sum, step_.replica_dtype, k) : sum);
    }
    Values total = sum_rows(rows);
    if (step_.replicate > 1 && step_.shard_over == ShardOver::kMesh) {
      total = times_power_of_two(std::move(total), k);
    } else if (step_.replicate > 1) {
      total =
          times_power_of_two(on_wire(std::move(total), step_.replica_dtype, total_k - k), total_k);
    }
    add_to(total_, total);
    carry_count_ = 0;
  }

  ReferenceStep step_;
  std::size_t count_;
  std::vector<std::optional<Values>> local_;  // per rank, sync = none
  int local_count_ = 0;                       // microbatches in it
  std::vector<std::optional<Values>> carry_;  // per replica, undivided
  int carry_count_ = 0;                       // microbatches in it
  std::optional<Values> total_;               // replica-summed, undivided
};

std::size_t element_count(const Gradients& gradients) {
  for (const auto& microbatch : gradients) {
    for (const auto& values : microbatch) {
      if (values) return values->size();
    }
  }
  return 0;
}

Simulation simulate(const ReferenceStep& step, const Gradients& gradients) {
  Simulation simulation(step, element_count(gradients));
  for (std::size_t m = 0; m < step.schedule.size(); ++m) {
    simulation.microbatch(gradients[m], step.schedule[m]);
  }
  if (step.finish) simulation.finish();
  return simulation;
}

}  // namespace

Values reference_result(const ReferenceStep& step, const Gradients& gradients) {
  const double factor = step.divide_factor.value_or(step.replicate * step.shard);
  return divided(simulate(step, gradients).total(), factor, step.loss_scale);
}

Values reference_partial(const ReferenceStep& step, const Gradients& gradients, int replica) {
  const double factor = step.divide_factor.value_or(step.shard);
  return divided(*simulate(step, gradients).carry(replica), factor, step.loss_scale);
}

Values accumulate_after_all_reduce(const ReferenceStep& step, const Gradients& gradients,
                                   int replica) {
  ReferenceStep before = step;
  before.schedule.pop_back();
  ReferenceStep last = step;
  last.schedule = {Sync::kAll};
  const Values total = simulate(last, {gradients.back()}).total();
  const double factor = step.divide_factor.value_or(step.replicate * step.shard);
  return divided(add(total, *simulate(before, gradients).carry(replica)), factor, step.loss_scale);
}

float round_to(Dtype dtype, float value) {
  if (dtype == Dtype::kF32 || !std::isfinite(value) || value == 0.0F) return value;
  const bool bf16 = dtype == Dtype::kBf16;
  const int fraction_bits = bf16 ? 7 : 10;
  const int smallest_exponent = bf16 ? -126 : -14;
  const double largest = bf16 ? 0x1.fep127 : 65504.0;
  const int exponent = std::max(std::ilogb(value), smallest_exponent);
  const double quantum = std::ldexp(1.0, exponent - fraction_bits);
  const double rounded = std::nearbyint(static_cast<double>(value) / quantum) * quantum;
  if (std::abs(rounded) > largest) {
    return std::copysign(std::numeric_limits<float>::infinity(), value);
  }
  return static_cast<float>(rounded);
}

int power_of_two_above(int n) {
  int exponent = 0;
  while ((1 << exponent) < n) ++exponent;
  return exponent;
}

}  // namespace hsdp::test
