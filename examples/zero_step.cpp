// Trains a small network with ZeRO stage 2: a rank has whole layers, but gradients and AdamW's
// moments only of its slices. Updated layers are gathered while the next step's forward pass
// begins. Every rank also trains the same network alone, with its own AdamW in fp64, and returns 1
// if the two differ by more than rounding:
//
//   hsdp_run -n 4 zero_step
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "hsdp/reducer.h"
#include "zero/adamw.h"
#include "zero/parameter_gather.h"

namespace {

constexpr int kSteps = 60;
constexpr int kMicrobatches = 2;
constexpr int kSamples = 8;  // in a rank's microbatch
constexpr double kMaxNorm = 0.5;
constexpr hsdp::zero::AdamWOptions kOptions{.lr = 0.01, .weight_decay = 0.01};

using Vector = std::vector<float>;

struct Layer {
  Layer(std::string its_name, std::size_t its_inputs, std::size_t its_outputs)
      : name(std::move(its_name)),
        inputs(its_inputs),
        outputs(its_outputs),
        weights(inputs * outputs),
        gradient(inputs * outputs) {
    std::minstd_rand random(static_cast<unsigned>(outputs));
    std::normal_distribution<float> normal(0.0F, 1.0F / std::sqrt(static_cast<float>(inputs)));
    for (float& weight : weights) weight = normal(random);
  }
  [[nodiscard]] hsdp::Shape shape() const {
    return {static_cast<std::int64_t>(outputs), static_cast<std::int64_t>(inputs)};
  }
  [[nodiscard]] Vector forward(const Vector& x) const {
    Vector y(outputs);
    for (std::size_t o = 0; o < outputs; ++o) {
      for (std::size_t i = 0; i < inputs; ++i) y[o] += weights[o * inputs + i] * x[i];
    }
    return y;
  }
  // From the gradient of the outputs, adds that of the weights and returns that of the inputs.
  Vector backward(const Vector& x, const Vector& of_outputs) {
    Vector of_inputs(inputs);
    for (std::size_t o = 0; o < outputs; ++o) {
      for (std::size_t i = 0; i < inputs; ++i) {
        gradient[o * inputs + i] += of_outputs[o] * x[i];
        of_inputs[i] += weights[o * inputs + i] * of_outputs[o];
      }
    }
    return of_inputs;
  }

  std::string name;
  std::size_t inputs;
  std::size_t outputs;
  Vector weights;
  Vector gradient;
};

using Network = std::vector<Layer>;

Network make_network() { return {{"first", 32, 96}, {"second", 96, 16}}; }

// Adds the gradients of one microbatch of one rank and returns its loss: the network learns
// differences. Calls wait(name) before it reads a layer.
template <class Wait>
double pass(Network& network, int step, int microbatch, int rank, const Wait& wait) {
  Layer& first = network[0];
  Layer& second = network[1];
  std::minstd_rand random(static_cast<unsigned>((step * kMicrobatches + microbatch) * 64 + rank));
  std::normal_distribution<float> normal;
  std::vector<Vector> inputs(kSamples, Vector(first.inputs));
  std::vector<Vector> hidden;
  wait(first.name);
  for (Vector& x : inputs) {
    for (float& value : x) value = normal(random);
    hidden.push_back(first.forward(x));
    for (float& value : hidden.back()) value = std::tanh(value);
  }
  wait(second.name);
  double loss = 0.0;
  for (std::size_t s = 0; s < kSamples; ++s) {
    Vector error = second.forward(hidden[s]);
    for (std::size_t o = 0; o < error.size(); ++o) {
      error[o] -= inputs[s][o] - inputs[s][o + error.size()];
      loss += 0.5 * error[o] * error[o] / kSamples;
      error[o] /= kSamples * kMicrobatches;
    }
    Vector of_hidden = second.backward(hidden[s], error);
    for (std::size_t h = 0; h < of_hidden.size(); ++h) {
      of_hidden[h] *= 1.0F - hidden[s][h] * hidden[s][h];
    }
    static_cast<void>(first.backward(inputs[s], of_hidden));
  }
  return loss;
}

double clip_factor(double norm) { return std::min(1.0, kMaxNorm / norm); }

struct Result {
  Network network = make_network();
  double first_loss = 0.0;
  double last_loss = 0.0;
};

Result train_sharded(const hsdp::Mesh& mesh) {
  Result result;
  Network& network = result.network;
  hsdp::Reducer reducer(mesh);
  for (const Layer& layer : network) {
    reducer.register_parameter({.name = layer.name, .shape = layer.shape()});
  }
  reducer.prepare();
  std::vector<hsdp::zero::AdamWParameter> slices;
  std::vector<hsdp::zero::GatheredParameter> wholes;
  for (Layer& layer : network) {
    const hsdp::TensorView whole{layer.weights.data(),
                                 static_cast<std::int64_t>(layer.weights.size())};
    const hsdp::Slice own = reducer.slice(layer.name);
    slices.push_back({.name = layer.name, .slice = whole.slice(own.offset, own.count)});
    wholes.push_back({.name = layer.name, .array = whole});
  }
  hsdp::zero::AdamW optimizer(reducer, slices, kOptions);
  hsdp::zero::ParameterGather gather(reducer, wholes, 1024);  // gathers each layer separately
  hsdp::Stream stream = hsdp::Stream::inline_host();
  for (int step = 0; step < kSteps; ++step) {
    double loss = 0.0;
    for (int m = 0; m < kMicrobatches; ++m) {
      for (Layer& layer : network) std::ranges::fill(layer.gradient, 0.0F);
      hsdp::Microbatch microbatch(reducer, {.last = m + 1 == kMicrobatches});
      loss += pass(network, step, m, mesh.rank(), [&](const auto& name) { gather.wait(name); });
      for (const Layer& layer : network) {
        reducer.gradient_ready(layer.name, {.data = layer.gradient.data(), .shape = layer.shape()});
      }
      microbatch.end();
    }
    const auto factor = static_cast<float>(clip_factor(reducer.grad_norm()));
    gather.fence(stream);
    optimizer.update(stream, {.grad_factor = &factor});
    gather.start_all(stream.record());
    result.last_loss = loss / kMicrobatches;
    if (step == 0) result.first_loss = result.last_loss;
    if (mesh.rank() == 0 && step % 20 == 0) {
      std::printf("step %2d: loss %.3f\n", step, result.last_loss);
    }
  }
  gather.wait_all();
  if (mesh.rank() == 0) {
    long long own = 0;
    long long all = 0;
    for (std::size_t l = 0; l < network.size(); ++l) {
      own += slices[l].slice.count;
      all += wholes[l].array.count;
    }
    std::printf("moments of %lld of %lld parameters on this rank\n", own, all);
    std::printf("%lld gathers, for which it waited %.1f ms\n",
                static_cast<long long>(gather.stats().gather_count),
                1e3 * gather.stats().exposed_s);
  }
  return result;
}

// What all ranks do together, in one process and without hsdp.
Network train_alone(int ranks) {
  Network network = make_network();
  std::vector<std::vector<double>> first_moments;
  std::vector<std::vector<double>> second_moments;
  for (const Layer& layer : network) {
    first_moments.emplace_back(layer.weights.size());
    second_moments.emplace_back(layer.weights.size());
  }
  for (int step = 0; step < kSteps; ++step) {
    for (Layer& layer : network) std::ranges::fill(layer.gradient, 0.0F);
    for (int m = 0; m < kMicrobatches; ++m) {
      for (int r = 0; r < ranks; ++r) pass(network, step, m, r, [](const auto& /*name*/) {});
    }
    double squares = 0.0;
    for (Layer& layer : network) {
      for (float& g : layer.gradient) squares += std::pow(g /= static_cast<float>(ranks), 2);
    }
    const double factor = clip_factor(std::sqrt(squares));
    const double correction1 = 1.0 - std::pow(kOptions.beta1, step + 1);
    const double correction2 = 1.0 - std::pow(kOptions.beta2, step + 1);
    for (std::size_t l = 0; l < network.size(); ++l) {
      for (std::size_t i = 0; i < network[l].weights.size(); ++i) {
        const double g = network[l].gradient[i] * factor;
        double& m = first_moments[l][i];
        double& v = second_moments[l][i];
        m += (g - m) * (1.0 - kOptions.beta1);
        v = v * kOptions.beta2 + g * g * (1.0 - kOptions.beta2);
        const double denominator = std::sqrt(v / correction2) + kOptions.epsilon;
        const double kept = network[l].weights[i] * (1.0 - kOptions.lr * kOptions.weight_decay);
        network[l].weights[i] =
            static_cast<float>(kept - kOptions.lr * m / correction1 / denominator);
      }
    }
  }
  return network;
}

}  // namespace

int main() {
  const hsdp::Mesh mesh = hsdp::init_mesh({.replicate = 2, .shard = 2});
  const Result sharded = train_sharded(mesh);
  const Network alone = train_alone(mesh.size());
  double difference = 0.0;
  for (std::size_t l = 0; l < alone.size(); ++l) {
    for (std::size_t i = 0; i < alone[l].weights.size(); ++i) {
      difference = std::max<double>(difference,
                                    std::abs(sharded.network[l].weights[i] - alone[l].weights[i]));
    }
  }
  const bool fine = difference < 1e-4 && sharded.last_loss < 0.5 * sharded.first_loss;
  if (mesh.rank() == 0 || !fine) {
    std::printf("loss %.3f -> %.3f, weights within %.1e of one process's: %s\n", sharded.first_loss,
                sharded.last_loss, difference, fine ? "fine" : "WRONG");
  }
  return fine ? 0 : 1;
}
