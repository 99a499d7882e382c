// Sends the same gradients between two replicas in four ways. Reports how many bytes each takes,
// and how far the sum received after 50 steps is from the sum sent:
//
//   hsdp_run -n 4 loco_step
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "hsdp/reducer.h"
#include "quant/loco_hop.h"

namespace {

constexpr int kSteps = 50;
constexpr std::int64_t kCount = 262'144;  // 256 * 1024

// A direction common to all steps, plus noise; different on each rank.
class Gradients {
 public:
  explicit Gradients(int rank) : random_(static_cast<unsigned>(rank)), always_(kCount) {
    for (float& value : always_) value = normal_(random_);
  }
  std::vector<float> next() {
    std::vector<float> gradient = always_;
    for (float& value : gradient) value += normal_(random_);
    return gradient;
  }

 private:
  std::minstd_rand random_;
  std::normal_distribution<float> normal_;
  std::vector<float> always_;
};

// Returns what a rank has received in all steps.
std::vector<double> run(const hsdp::Mesh& mesh, std::shared_ptr<hsdp::ReplicaHop> hop,
                        const char* name) {
  hsdp::Reducer reducer(mesh, {.replica_hop = std::move(hop)});
  reducer.register_parameter({.name = "weight", .shape = {256, 1024}});
  Gradients gradients(mesh.rank());
  std::vector<double> sum;
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<float> gradient = gradients.next();
    reducer.begin_microbatch({.last = true});
    reducer.gradient_ready("weight", {.data = gradient.data(), .shape = {256, 1024}});
    reducer.end_microbatch();
    const hsdp::TensorView mean = reducer.shard("weight");
    sum.resize(static_cast<std::size_t>(mean.count));
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<const float*>(mean.data)[i];
  }
  const auto bytes = reducer.stats().replica_hop_bytes / kSteps;
  if (mesh.rank() == 0)
    std::printf("%-12s %7lld bytes a step\n", name, static_cast<long long>(bytes));
  return sum;
}

void report(const hsdp::Mesh& mesh, const char* name, const std::vector<double>& got,
            const std::vector<double>& want) {
  double missed = 0.0;
  double all = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    missed += (got[i] - want[i]) * (got[i] - want[i]);
    all += want[i] * want[i];
  }
  if (mesh.rank() == 0) {
    std::printf("%-12s %6.3f %% off after %d steps\n", name, 100 * std::sqrt(missed / all), kSteps);
  }
}

}  // namespace

int main() {
  const hsdp::Mesh mesh = hsdp::init_mesh({.replicate = 2, .shard = 2});
  const auto want = run(mesh, std::make_shared<hsdp::PlainHop>(hsdp::Dtype::kF32), "f32");
  const auto bf16 = run(mesh, std::make_shared<hsdp::PlainHop>(hsdp::Dtype::kBf16), "bf16");
  hsdp::quant::LocoOptions plain;
  plain.error_feedback = false;
  const auto four = run(mesh, std::make_shared<hsdp::quant::LocoHop>(plain), "plain 4 bit");
  const auto loco = run(mesh, std::make_shared<hsdp::quant::LocoHop>(), "LoCo");
  report(mesh, "bf16", bf16, want);
  report(mesh, "plain 4 bit", four, want);
  report(mesh, "LoCo", loco, want);
}
