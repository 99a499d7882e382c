#include "zero/adamw.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hsdp/comm/operation_record.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "zero/adamw_kernels.h"

namespace hsdp::zero {
namespace {

constexpr const char* kAdamW = "zero: AdamW";
constexpr std::int64_t kMomentMultiple = 16;  // elements, to align the moments of every slice

void require_range(const char* name, double value, double below) {
  if (value >= 0.0 && value < below) return;
  throw UsageError(
      {.where = std::string(kAdamW) + ": " + name,
       .expected = below == 1.0 ? "at least 0 and below 1" : "a finite number of at least 0",
       .got = std::to_string(value)});
}

void check(const AdamWOptions& options) {
  require_range("lr", options.lr, HUGE_VAL);
  require_range("beta1", options.beta1, 1.0);
  require_range("beta2", options.beta2, 1.0);
  require_range("epsilon", options.epsilon, HUGE_VAL);
  require_range("weight_decay", options.weight_decay, HUGE_VAL);
}

void check_slice(const AdamWParameter& parameter, std::int64_t count, Device device) {
  const TensorView& slice = parameter.slice;
  const ConstTensorView wanted(nullptr, count, Dtype::kF32, device);
  if (slice.count != wanted.count || slice.dtype != wanted.dtype || slice.device != wanted.device) {
    throw UsageError({.where = std::string(kAdamW) + ": slice of '" + parameter.name + "'",
                      .expected = to_string(wanted) + ", this rank's slice",
                      .got = to_string(slice),
                      .remedy = "a 16-bit parameter needs an fp32 master of its slice"});
  }
  if (slice.data == nullptr && count > 0) {
    throw UsageError({.where = std::string(kAdamW) + ": slice of '" + parameter.name + "'",
                      .expected = to_string(wanted),
                      .got = "a null pointer"});
  }
}

// Masters and moments are fp32.
void check_gradients(const Reducer& reducer, const std::string& parameter) {
  const std::vector<ParameterSpec>& specs = reducer.parameters();
  const auto spec = std::ranges::find(specs, parameter, &ParameterSpec::name);
  if (spec == specs.end() || sums_in_f32(spec->dtype)) return;
  throw UsageError({.where = std::string(kAdamW) + ": gradients of '" + parameter + "'",
                    .expected = "f32, bf16 or f16",
                    .got = std::string(name(spec->dtype)),
                    .remedy = "update its slice in f64 from reducer.shard()"});
}

std::int64_t moment_room(std::int64_t count) {
  return (count + kMomentMultiple - 1) / kMomentMultiple * kMomentMultiple;
}

}  // namespace

struct AdamW::Parts {
  Parts(Reducer& its_reducer, std::vector<AdamWParameter> its_parameters,
        const AdamWOptions& its_options)
      : reducer(its_reducer), parameters(std::move(its_parameters)), options(its_options) {}

  void lay_out();
  [[nodiscard]] AdamWClock* clock() const {
    return reinterpret_cast<AdamWClock*>(clock_memory.data());
  }
  void require_device(const Stream& stream) const;

  Reducer& reducer;
  std::vector<AdamWParameter> parameters;
  AdamWOptions options;
  std::unordered_map<std::string_view, std::size_t> indices;  // by name
  std::vector<AdamWSlice> slices;                             // of `parameters`
  Buffer moments;
  MemoryCount::Held held;  // of the moments
  Buffer clock_memory;
};

// Checks everything and allocates the moments.
void AdamW::Parts::lay_out() {
  std::int64_t bytes = 0;
  for (const AdamWParameter& parameter : parameters) {
    const std::int64_t count = reducer.slice(parameter.name).count;
    check_slice(parameter, count, reducer.device());
    check_gradients(reducer, parameter.name);
    if (!indices.emplace(parameter.name, indices.size()).second) {
      throw UsageError({.where = kAdamW,
                        .expected = "every parameter once",
                        .got = "'" + parameter.name + "' twice"});
    }
    bytes += moment_bytes(count);
  }
  moments = Buffer(reducer.device(), static_cast<std::size_t>(bytes));
  held = ReducerInternal(reducer).memory_count().hold(MemoryKind::kOptimizer, bytes);
  clock_memory = Buffer(reducer.device(), sizeof(AdamWClock));
  auto* next = reinterpret_cast<float*>(moments.data());
  for (const AdamWParameter& parameter : parameters) {
    AdamWSlice& slice = slices.emplace_back();
    slice.parameter = static_cast<float*>(parameter.slice.data);
    slice.count = parameter.slice.count;
    slice.first = next;
    next += moment_room(slice.count);
    slice.second = next;
    next += moment_room(slice.count);
  }
}

void AdamW::Parts::require_device(const Stream& stream) const {
  if (stream.device() == reducer.device()) return;
  throw UsageError({.where = kAdamW,
                    .expected = "a stream of " + to_string(reducer.device()),
                    .got = "one of " + to_string(stream.device())});
}

AdamW::AdamW(Reducer& reducer, std::vector<AdamWParameter> parameters, const AdamWOptions& options)
    : parts_(std::make_unique<Parts>(reducer, std::move(parameters), options)) {
  reducer.prepare();  // fixes the slices; first, as it is collective
  check(options);
  parts_->lay_out();
}

AdamW::~AdamW() = default;

std::int64_t AdamW::moment_bytes(std::int64_t slice_count) {
  return 2 * moment_room(slice_count) * static_cast<std::int64_t>(sizeof(float));
}

void AdamW::update(Stream& stream, const AdamWUpdate& how) {
  parts_->require_device(stream);
  std::vector<AdamWSlice> slices = parts_->slices;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    slices[i].gradient =
        static_cast<const float*>(parts_->reducer.shard(parts_->parameters[i].name).data);
  }
  const AdamWTick tick{parts_->options, how.grad_factor, how.found_inf, parts_->clock()};
  const OperationPlace place{.kind = OperationKind::kUpdate, .step = parts_->reducer.state().step};
  stream.run([slices = std::move(slices), tick, inside = stream.inside_task(), place,
              &operations = ReducerInternal(parts_->reducer).operations()] {
    Operation operation(operations, place);
    adamw_tick(tick, inside);
    adamw_update(slices, tick.clock, inside);
    if (inside.device().type != DeviceType::kHost) operation.end(OperationState::kIssued);
  });
}

void AdamW::set_learning_rate(double lr) {
  AdamWOptions options = parts_->options;
  options.lr = lr;
  check(options);
  parts_->options = options;
}

const AdamWOptions& AdamW::options() const { return parts_->options; }

AdamWMoments AdamW::moments(std::string_view name) const {
  const auto found = parts_->indices.find(name);
  if (found == parts_->indices.end()) {
    throw UsageError({.where = kAdamW,
                      .expected = "a parameter that it was made with",
                      .got = "'" + std::string(name) + "'"});
  }
  const AdamWSlice& slice = parts_->slices[found->second];
  const Device device = parts_->reducer.device();
  return {{slice.first, slice.count, Dtype::kF32, device},
          {slice.second, slice.count, Dtype::kF32, device}};
}

std::int64_t AdamW::steps(Stream& stream) const {
  parts_->require_device(stream);
  AdamWClock clock;
  stream.run([&clock, from = parts_->clock(), inside = stream.inside_task()] {
    copy_bytes(&clock, from, sizeof(clock), inside);
  });
  stream.synchronize();
  return clock.steps;
}

void AdamW::set_steps(std::int64_t steps, Stream& stream) {
  parts_->require_device(stream);
  if (steps < 0) {
    throw UsageError({.where = std::string(kAdamW) + ": set_steps",
                      .expected = "at least 0",
                      .got = std::to_string(steps)});
  }
  AdamWClock clock;
  // Step by step, so that the powers have the same bits.
  while (clock.steps < steps) count_step(clock, parts_->options);
  stream.run([&clock, to = parts_->clock(), inside = stream.inside_task()] {
    copy_bytes(to, &clock, sizeof(clock), inside);
  });
  stream.synchronize();
}

}  // namespace hsdp::zero
