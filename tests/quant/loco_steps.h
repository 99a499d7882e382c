// Random uses of a LocoHop without a Reducer: options, buckets and what is reduced in each step.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "quant/loco_hop.h"
#include "tests/support/loco_reference.h"

namespace hsdp::quant {

using Floats = test::LocoReference::Floats;

struct Configuration {
  LocoOptions options;
  int replicas = 2;
  std::vector<std::string> names;
  std::vector<std::int64_t> counts;
  std::vector<std::vector<ParameterRange>> buckets;
  int steps = 4;
  bool mixed = false;  // excluded parameters share buckets with others, as in rows of replica_hook
};

template <class T>
T one_of(std::mt19937& random, const std::vector<T>& choices) {
  return choices[random() % choices.size()];
}

// Excluded ones in buckets of their own, unless mixed; large ones may be cut over two, at groups.
void cut_into_buckets(Configuration& made, std::mt19937& random);
Configuration random_configuration(std::mt19937& random);

// What all replicas do in one reduction.
struct Reduction {
  std::vector<std::vector<Floats>> sums;  // [replica][parameter]
  float divisor = 1.0F;
};
struct Step {
  std::vector<Reduction> reductions;
  bool drops = false;
  float scale = 1.0F;  // of the errors, after it
};
std::vector<Step> random_steps(const Configuration& made, std::mt19937& random);

HopPlan plan_of(const Configuration& made);

// All reductions of a step on one replica; what stands in the end, by parameter.
std::vector<Floats> run_step(LocoHop& hop, const Configuration& made, const Step& step, int replica,
                             std::atomic<std::uint32_t>& nonfinite);

}  // namespace hsdp::quant
