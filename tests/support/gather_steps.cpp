#include "tests/support/gather_steps.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <numeric>
#include <utility>

#include "hsdp/device/copy.h"

namespace hsdp::test {
namespace {

// The same on every rank.
std::vector<int> shuffled(int count, std::uint64_t seed) {
  std::vector<int> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  Random(seed).shuffle(order);
  return order;
}

// The whole parameters of a rank, twice: from gathers in the background, and from
// gather_parameters().
class GatheredParameters {
 public:
  GatheredParameters(Reducer& reducer, const StepCase& step, const Mesh& mesh,
                     std::int64_t unit_bytes)
      : reducer_(reducer),
        device_(mesh.device()),
        reader_(Stream::create(device_, "reader")),
        writer_(Stream::create(device_, "writer")) {
    std::vector<zero::GatheredParameter> arrays;
    for (const ParameterSpec& spec : step.parameters) {
      const std::int64_t count = element_count(spec.shape);
      Values start(static_cast<std::size_t>(count));
      std::iota(start.begin(), start.end(), static_cast<float>(names_.size()));
      names_.push_back(spec.name);
      background_.push_back(start);
      foreground_.push_back(start);
      arrays.push_back({.name = spec.name, .array = whole(background_.back())});
    }
    gather_.emplace(reducer, std::move(arrays), unit_bytes);
  }
  ~GatheredParameters() {
    gather_->fence(writer_);
    writer_.synchronize();  // before the memory goes
  }
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

  // One optimizer step. The gathers that it starts are still under way when it returns.
  void update(const std::vector<Values>& shards, std::uint64_t seed) {
    gather_->fence(writer_);
    updates_.clear();  // the updates of the last step are over
    writer_.synchronize();
    for (const int unit : shuffled(gather_->unit_count(), seed)) {
      for (const int parameter : gather_->unit(unit)) {
        update_slice(static_cast<std::size_t>(parameter),
                     shards[static_cast<std::size_t>(parameter)]);
      }
      gather_->start(unit, writer_.record());
    }
    std::vector<NamedArray> arrays;
    for (std::size_t p = 0; p < names_.size(); ++p) {
      arrays.push_back({names_[p], whole(foreground_[p])});
    }
    reducer_.gather_parameters(arrays);
    if (device_.type != DeviceType::kHost) static_cast<void>(reducer_.grad_norm());  // after it
  }

  void expect_current(int parameter) {
    const auto p = static_cast<std::size_t>(parameter);
    Values got(background_[p].size());
    gather_->wait(parameter, reader_);
    reader_.run([&, inside = reader_.inside_task()] {
      copy_bytes(got.data(), background_[p].data(), got.size() * sizeof(float), inside);
    });
    reader_.synchronize();
    expect_same_bits(got, foreground_[p], names_[p]);
  }
  [[nodiscard]] std::vector<Values> read_all() {
    for (int p = 0; p < static_cast<int>(names_.size()); ++p) expect_current(p);
    return foreground_;
  }

 private:
  [[nodiscard]] TensorView whole(Values& values) const {
    return {values.data(), std::ssize(values), Dtype::kF32, device_};
  }
  void update_slice(std::size_t p, const Values& gradient) {
    float* const own = foreground_[p].data() + reducer_.slice(names_[p]).offset;
    for (std::size_t i = 0; i < gradient.size(); ++i) own[i] = 0.5F * own[i] + gradient[i];
    const Values& update = updates_.emplace_back(own, own + gradient.size());
    float* const to = background_[p].data() + (own - foreground_[p].data());
    writer_.run([&update, to, inside = writer_.inside_task()] {
      copy_bytes(to, update.data(), update.size() * sizeof(float), inside);
    });
  }

  Reducer& reducer_;
  Device device_;
  std::vector<std::string> names_;
  std::vector<Values> background_;
  std::vector<Values> foreground_;
  std::deque<Values> updates_;  // under way
  Stream reader_;
  Stream writer_;
  std::optional<zero::ParameterGather> gather_;
};

}  // namespace

std::vector<Values> run_gather_steps(Reducer& reducer, const StepCase& step, const Mesh& mesh,
                                     const GatherSteps& steps) {
  reducer.prepare();
  GatheredParameters parameters(reducer, step, mesh, steps.unit_bytes);
  Random random(steps.seed + static_cast<std::uint64_t>(mesh.rank()));
  const auto read_some = [&] {
    for (int reads = random.integer(0, 2); reads > 0; --reads) {
      parameters.expect_current(random.integer(0, static_cast<int>(step.parameters.size()) - 1));
    }
  };
  for (int k = 0; k < steps.count; ++k) {
    for (int m = 0; m < static_cast<int>(step.schedule.size()); ++m) {
      steps.microbatch(m, read_some);
      read_some();
    }
    parameters.update(steps.shards(), steps.seed + static_cast<std::uint64_t>(k));
  }
  return parameters.read_all();
}

GatherSteps gather_steps_on_host(Reducer& reducer, const StepCase& step, int rank) {
  GatherSteps steps;
  steps.microbatch = [&reducer, &step, rank](int m, const std::function<void()>& inside) {
    Microbatch open(reducer, {.sync = step.schedule[static_cast<std::size_t>(m)]});
    const auto stored = deliver(reducer, step, m, rank, {.order = Order::kRandom});
    inside();
    open.end();
  };
  steps.shards = [&reducer, &step] { return read_result(reducer, step).shards; };
  return steps;
}

}  // namespace hsdp::test
