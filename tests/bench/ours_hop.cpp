// One step of a Reducer on a 2x1 mesh for each of four replica hops, in turns: what goes between
// two replicas decides the time when the link is slow. slow_link.py runs it over such a link.
// --sleeping-mbit=N: over one of that rate inside the processes.
//
//   hop <name> <elements> <median_ms> <bytes a rank sends in a step>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/comm/world.h"
#include "hsdp/reducer.h"
#include "measurement.h"
#include "quant/loco_hop.h"
#include "sleeping_link.h"

namespace {

using hsdp::Dtype;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kParameterCount = std::int64_t{1} << 20;  // elements of one parameter

std::shared_ptr<hsdp::ReplicaHop> make_hop(const std::string& name) {
  if (name == "f32") return std::make_shared<hsdp::PlainHop>(Dtype::kF32);
  if (name == "bf16") return std::make_shared<hsdp::PlainHop>(Dtype::kBf16);
  return std::make_shared<hsdp::quant::LocoHop>(
      hsdp::quant::LocoOptions{.error_feedback = name == "loco"});
}

struct Variant {
  std::string name;
  std::unique_ptr<hsdp::Reducer> reducer;
  std::vector<double> times;
};

void step(hsdp::Reducer& reducer, const std::vector<float>& gradient, int parameters) {
  reducer.begin_microbatch({.last = true});
  for (int i = parameters - 1; i >= 0; --i) {
    reducer.gradient_ready(i, {.data = gradient.data(), .shape = {kParameterCount}});
  }
  reducer.end_microbatch();
  for (int i = 0; i < parameters; ++i) static_cast<void>(reducer.shard(std::to_string(i)));
}

double slowest(hsdp::Communicator& world, double value) {
  std::vector<double> all(static_cast<std::size_t>(world.size()));
  world.all_gather({&value, 1, Dtype::kF64}, {all.data(), world.size(), Dtype::kF64});
  return *std::max_element(all.begin(), all.end());
}

}  // namespace

int main(int argc, char** argv) {
  const hsdp::bench::Arguments arguments = hsdp::bench::parse_arguments(argc, argv);
  const int parameters = std::stoi(arguments.value("mebielements", "16"));
  const int rounds = std::stoi(arguments.value("rounds", "7"));
  const double sleeping_mbit = std::stod(arguments.value("sleeping-mbit", "0"));
  hsdp::Communicator job = hsdp::connect_world();
  if (sleeping_mbit > 0) job = hsdp::bench::behind_sleeping_link(job, sleeping_mbit * 1e6 / 8);
  const hsdp::Mesh mesh(job, {.replicate = 2, .shard = 1});
  hsdp::bench::pin_to_core(mesh.rank());
  hsdp::Communicator world = mesh.world();
  std::vector<float> gradient(kParameterCount);
  for (std::int64_t i = 0; i < kParameterCount; ++i) {
    gradient[static_cast<std::size_t>(i)] = hsdp::bench::input_value(i * i, mesh.rank());
  }
  std::vector<Variant> variants;
  for (const char* const name : {"f32", "bf16", "plain4", "loco"}) {
    variants.push_back(
        {name,
         std::make_unique<hsdp::Reducer>(mesh, hsdp::ReducerOptions{.replica_hop = make_hop(name)}),
         {}});
    for (int i = 0; i < parameters; ++i) {
      variants.back().reducer->register_parameter(
          {.name = std::to_string(i), .shape = {kParameterCount}});
    }
  }
  for (int round = 0; round <= rounds; ++round) {  // the first one warms up
    for (Variant& variant : variants) {
      world.barrier();
      const auto begin = Clock::now();
      step(*variant.reducer, gradient, parameters);
      const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
      const double worst = slowest(world, time.count());
      if (round > 0) variant.times.push_back(worst);
    }
  }
  for (Variant& variant : variants) {
    std::ranges::sort(variant.times);
    if (mesh.rank() != 0) continue;
    std::printf("hop %s %lld %.3f %lld\n", variant.name.c_str(),
                static_cast<long long>(parameters * kParameterCount),
                variant.times[variant.times.size() / 2],
                static_cast<long long>(variant.reducer->stats().replica_hop_bytes / (rounds + 1)));
  }
}
