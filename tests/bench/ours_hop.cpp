// Times one step of a Reducer over a slow link, which dominates the time, in variants that take
// turns. On a mesh of Rx1 it times four replica hops; on another mesh (--shard=S), four backward
// passes that are reduced one by one or as a window. slow_link.py runs it over a slow link;
// --sleeping-mbit=N simulates one of that rate inside the processes. --backward-ms=N makes a
// backward pass of a window take that long without using the cores, as on a GPU; default 0.
//
//   step <variant> <elements> <median_ms> <bytes a rank sends in a step>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/reducer.h"
#include "hsdp_group.h"
#include "quant/loco_hop.h"
#include "sleeping_link.h"
#include "zero/coalesced_window.h"

namespace {

using hsdp::Dtype;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kParameterCount = std::int64_t{1} << 20;  // elements of one parameter
constexpr int kBackwards = 4;

// Parameters in the order in which a backward pass produces their gradients. All gradients are the
// same array.
class Model {
 public:
  Model(int parameters, Dtype dtype, int rank, Clock::duration backward)
      : parameters_(parameters),
        dtype_(dtype),
        gradient_(static_cast<std::size_t>(kParameterCount) * hsdp::size_bytes(dtype)),
        pause_(backward / parameters) {
    for (std::int64_t i = 0; i < kParameterCount; ++i) {
      hsdp::bench::write_value(gradient_.data(), i, dtype, hsdp::bench::input_value(i * i, rank));
    }
  }

  [[nodiscard]] std::unique_ptr<hsdp::Reducer> make_reducer(const hsdp::Mesh& mesh,
                                                            hsdp::ReducerOptions options) const {
    auto reducer = std::make_unique<hsdp::Reducer>(mesh, std::move(options));
    for (int i = 0; i < parameters_; ++i) {
      reducer->register_parameter(
          {.name = std::to_string(i), .shape = {kParameterCount}, .dtype = dtype_});
    }
    return reducer;
  }

  void backward(hsdp::Reducer& reducer) const {
    Clock::time_point produced = Clock::now();
    for (int i = 0; i < parameters_; ++i) {
      produced += pause_;
      if (pause_ > Clock::duration::zero()) std::this_thread::sleep_until(produced);
      reducer.gradient_ready(
          i, {.data = gradient_.data(), .dtype = dtype_, .shape = {kParameterCount}});
    }
  }

 private:
  int parameters_;
  Dtype dtype_;
  std::vector<std::byte> gradient_;
  Clock::duration pause_;  // before each gradient
};

struct Variant {
  std::string name;
  std::unique_ptr<hsdp::Reducer> reducer;
  std::function<void(hsdp::Reducer&)> backwards;  // runs a step's backward passes
  std::vector<double> times;
};

void one_by_one(hsdp::Reducer& reducer, const Model& model, int backwards) {
  for (int m = 0; m < backwards; ++m) {
    reducer.begin_microbatch({.last = m == backwards - 1});
    model.backward(reducer);
    reducer.end_microbatch();
  }
}

void as_window(hsdp::Reducer& reducer, const Model& model, std::optional<std::int64_t> declared) {
  hsdp::zero::CoalescedWindow window({&reducer}, {.backwards = declared});
  for (int m = 0; m < kBackwards; ++m) model.backward(reducer);
  window.end();
}

std::shared_ptr<hsdp::ReplicaHop> make_hop(const std::string& name) {
  if (name == "f32") return std::make_shared<hsdp::PlainHop>(Dtype::kF32);
  if (name == "bf16") return std::make_shared<hsdp::PlainHop>(Dtype::kBf16);
  return std::make_shared<hsdp::quant::LocoHop>(
      hsdp::quant::LocoOptions{.error_feedback = name == "loco"});
}

std::vector<Variant> make_hops(const hsdp::Mesh& mesh, const Model& model) {
  std::vector<Variant> variants;
  for (const char* const name : {"f32", "bf16", "plain4", "loco"}) {
    variants.push_back({name,
                        model.make_reducer(mesh, {.replica_hop = make_hop(name)}),
                        [&model](hsdp::Reducer& reducer) { one_by_one(reducer, model, 1); },
                        {}});
  }
  return variants;
}

std::vector<Variant> make_windows(const hsdp::Mesh& mesh, const Model& model) {
  std::vector<Variant> variants;
  const auto add = [&](const char* name, std::function<void(hsdp::Reducer&)> backwards) {
    variants.push_back({name, model.make_reducer(mesh, {}), std::move(backwards), {}});
  };
  add("each", [&](hsdp::Reducer& reducer) { one_by_one(reducer, model, kBackwards); });
  add("window", [&](hsdp::Reducer& reducer) { as_window(reducer, model, {}); });
  add("declared", [&](hsdp::Reducer& reducer) { as_window(reducer, model, kBackwards); });
  return variants;
}

void read_result(hsdp::Reducer& reducer) {
  for (const hsdp::ParameterSpec& parameter : reducer.parameters()) {
    static_cast<void>(reducer.shard(parameter.name));
  }
}

bool have_equal_results(hsdp::Reducer& a, hsdp::Reducer& b) {
  return std::ranges::all_of(a.parameters(), [&](const hsdp::ParameterSpec& parameter) {
    const hsdp::TensorView one = a.shard(parameter.name);
    const hsdp::TensorView other = b.shard(parameter.name);
    return std::memcmp(one.data, other.data, one.size_in_bytes()) == 0;
  });
}

// A collective's message has a row for each rank; a rank does not send its own.
long long sent_bytes(const hsdp::Mesh& mesh, const hsdp::ReducerStats& stats) {
  const auto sent = [](std::int64_t bytes, int ranks) { return bytes * (ranks - 1) / ranks; };
  return (sent(stats.shard_hop_bytes, mesh.shard_size()) +
          sent(stats.replica_hop_bytes, mesh.replicate_size())) /
         stats.step_count;
}

}  // namespace

int main(int argc, char** argv) {
  const hsdp::bench::Arguments arguments = hsdp::bench::parse_arguments(argc, argv);
  const int parameters = std::stoi(arguments.value("mebielements", "16"));
  const int rounds = std::stoi(arguments.value("rounds", "7"));
  const int shard = std::stoi(arguments.value("shard", "1"));
  const double sleeping_mbit = std::stod(arguments.value("sleeping-mbit", "0"));
  const std::chrono::milliseconds backward(std::stoi(arguments.value("backward-ms", "0")));
  hsdp::Communicator job = hsdp::connect_world();
  if (sleeping_mbit > 0) job = hsdp::bench::behind_sleeping_link(job, sleeping_mbit * 1e6 / 8);
  const hsdp::Mesh mesh(job, {.replicate = job.size() / shard, .shard = shard});
  hsdp::bench::pin_to_core(mesh.rank());
  const hsdp::bench::Group group = hsdp::bench::group_of(mesh.world());
  const Model model(parameters, shard == 1 ? Dtype::kF32 : Dtype::kBf16, mesh.rank(), backward);
  std::vector<Variant> variants = shard == 1 ? make_hops(mesh, model) : make_windows(mesh, model);
  for (int round = 0; round <= rounds; ++round) {  // the first one warms up
    for (Variant& variant : variants) {
      group.barrier();
      const auto begin = Clock::now();
      variant.backwards(*variant.reducer);
      read_result(*variant.reducer);
      const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
      const double worst = group.max(time.count());
      if (round > 0) variant.times.push_back(worst);
    }
  }
  for (Variant& variant : variants) {
    // All values are exact, so the results must be equal.
    if (shard > 1 && !have_equal_results(*variants.front().reducer, *variant.reducer)) {
      std::fprintf(stderr, "%s: expected the result of %s\n", variant.name.c_str(),
                   variants.front().name.c_str());
      return 1;
    }
    std::ranges::sort(variant.times);
    if (mesh.rank() != 0) continue;
    std::printf("step %s %lld %.3f %lld\n", variant.name.c_str(),
                static_cast<long long>(parameters * kParameterCount),
                variant.times[variant.times.size() / 2],
                sent_bytes(mesh, variant.reducer->stats()));
  }
}
