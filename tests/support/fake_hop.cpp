#include "tests/support/fake_hop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/tensor_view.h"

namespace hsdp::test {
namespace {

std::int8_t code_of(float value) {
  return static_cast<std::int8_t>(
      std::clamp(std::nearbyint(value / FakeHop::kStep), -127.0F, 127.0F));
}

float decoded(std::int8_t code) { return static_cast<float>(code) * FakeHop::kStep; }

template <typename T>
TensorView view_of(std::vector<T>& values, Dtype dtype) {
  return {values.data(), std::ssize(values), dtype, {}};
}

}  // namespace

std::vector<StepOutcome> outcomes(const std::vector<StepEnd>& ends) {
  std::vector<StepOutcome> all;
  for (const StepEnd& end : ends) {
    EXPECT_EQ(end.step, std::ssize(all));
    all.push_back(end.outcome);
  }
  return all;
}

float fake_mean(const std::vector<float>& sums, float divisor, std::vector<float>& errors) {
  float mean = 0.0F;
  for (std::size_t r = 0; r < sums.size(); ++r) {
    const float wanted = sums[r] / divisor + errors[r];
    const float sent = decoded(code_of(wanted));
    errors[r] = wanted - sent;
    mean += sent;
  }
  return mean;
}

// A bucket under way.
struct FakeHop::Exchange {
  HopBucket bucket;
  RowCut cut;
  std::vector<std::int8_t> codes;     // of this replica, all rows
  std::vector<std::int8_t> received;  // of all replicas, this rank's row
  std::vector<float> means;           // all rows
};

std::string FakeHop::describe() const {
  options_.on("describe");
  return options_.name;
}

std::string FakeHop::word() const {
  options_.on("word");
  return options_.word;
}

int FakeHop::bucket_class(const HopParameter& parameter) const {
  return options_.excluded.contains(parameter.name) ? 1 : 0;
}

bool FakeHop::is_excluded(int bucket) const {
  return !ranges(bucket).empty() &&
         options_.excluded.contains(parameter(ranges(bucket).front()).name);
}

void FakeHop::prepare(const HopPlan& plan) {
  options_.on("prepare");
  plan_ = &plan;
  std::int64_t bytes = 0;
  for (const HopParameter& parameter : plan.parameters) {
    std::vector<float>& error = errors_[parameter.name];
    error.resize(static_cast<std::size_t>(element_count(parameter.shape)));
    bytes += std::ssize(error) * static_cast<std::int64_t>(sizeof(float));
  }
  for (const auto& [key, values] : std::exchange(loaded_, {})) {
    const std::size_t slash = key.rfind('/');
    const std::int64_t offset = std::stoll(key.substr(slash + 2));
    std::ranges::copy(values, errors_.at(key.substr(0, slash)).begin() + offset);
  }
  held_ = nullptr;
  held_ = plan.memory.hold(MemoryKind::kReplicaHop, bytes);
}

// If it failed, its Event is released before the other ranks are done.
void FakeHop::finish_streams() {
  for (Stream* const stream : {&codec_, &scatter_wire_, &gather_wire_}) {
    try {
      stream->synchronize();
    } catch (const std::exception&) {  // the Event has thrown it
    }
  }
}

void FakeHop::bind(Communicator scatter, Communicator gather) {
  finish_streams();
  for (Stream* const stream : {&codec_, &scatter_wire_, &gather_wire_}) {
    *stream = Stream::host_worker("fake");  // a stream that failed would throw from now on
  }
  scatter_ = std::move(scatter);
  gather_ = std::move(gather);
}

void FakeHop::count(int change) {
  const std::scoped_lock lock(mutex_);
  in_flight_ += change;
  most_in_flight_ = std::max(most_in_flight_, in_flight_);
}

void FakeHop::encode(Exchange& exchange) {
  options_.on("codec");
  const auto* const sums = static_cast<const float*>(exchange.bucket.data.data);
  for (const ParameterRange& range : ranges(exchange.bucket.bucket)) {
    const std::string& name = parameter(range).name;
    std::vector<float>& errors = next_.try_emplace(name, errors_.at(name)).first->second;
    for (std::int64_t i = 0; i < range.count; ++i) {
      const float sum = sums[range.offset + i];
      if (!std::isfinite(sum)) exchange.bucket.nonfinite->store(1);
      float& error = errors[static_cast<std::size_t>(range.flat_offset + i)];
      const float wanted =
          sum / static_cast<float>(exchange.bucket.arithmetic.mean_divisor) + error;
      const std::int8_t code = code_of(wanted);
      error = wanted - decoded(code);
      exchange.codes[static_cast<std::size_t>(range.offset + i)] = code;
    }
  }
}

Event FakeHop::reduce(const HopBucket& bucket, Stream& /*stream*/) {
  options_.on("reduce");
  count(1);
  if (is_excluded(bucket.bucket)) {
    AllReduce args;
    args.data = bucket.data;
    args.divisor = bucket.arithmetic.divisor;
    args.nonfinite = bucket.nonfinite;
    args.bucket = bucket.bucket;
    scatter_.all_reduce(args, scatter_wire_);
    scatter_wire_.run([this] { count(-1); });
    return scatter_wire_.record();
  }
  const RowCut cut(bucket.data.count, scatter_.size());
  const int rank = scatter_.rank();
  const auto elements = static_cast<std::size_t>(cut.count());
  const std::int64_t own = cut.length(rank);
  const auto exchange = std::make_shared<Exchange>(
      Exchange{bucket, cut, std::vector<std::int8_t>(elements),
               std::vector<std::int8_t>(static_cast<std::size_t>(own * scatter_.size())),
               std::vector<float>(elements)});
  codec_.run([this, exchange] { encode(*exchange); });
  scatter_wire_.wait(codec_.record());
  scatter_.all_to_all(view_of(exchange->codes, Dtype::kU8), view_of(exchange->received, Dtype::kU8),
                      scatter_wire_, cut, {bucket.bucket, bucket.planned});
  scatter_wire_.run([exchange] {});  // keeps the wire's memory, whatever the other wire does
  gather_wire_.wait(scatter_wire_.record());
  gather_wire_.run([exchange, own, rank, replicas = scatter_.size()] {
    float* const means = exchange->means.data() + exchange->cut.begin(rank);
    for (std::int64_t i = 0; i < own; ++i) {
      for (int r = 0; r < replicas; ++r) {
        means[i] += decoded(exchange->received[static_cast<std::size_t>(r * own + i)]);
      }
    }
  });
  const TensorView means = view_of(exchange->means, Dtype::kF32);
  gather_.all_gather(means.slice(cut.begin(rank), own), means, gather_wire_, cut,
                     {bucket.bucket, bucket.planned});
  gather_wire_.run([this, exchange] {
    std::ranges::copy(exchange->means, static_cast<float*>(exchange->bucket.data.data));
    count(-1);
  });
  return gather_wire_.record();
}

void FakeHop::end_step(const StepEnd& end) {
  options_.on("end_step");
  if (end.outcome == StepOutcome::kDropped) finish_streams();
  ends_.push_back(end);
  if (end.outcome == StepOutcome::kClean) {
    for (auto& [name, error] : next_) errors_[name] = std::move(error);
  }
  next_.clear();
}

// Keys are "{parameter}/o{flat offset}".
std::vector<HopState> FakeHop::state() {
  std::vector<HopState> all;
  for (const std::vector<ParameterRange>& bucket : plan_->ranges) {
    for (const ParameterRange& range : bucket) {
      const std::string& name = parameter(range).name;
      all.push_back({name + "/o" + std::to_string(range.flat_offset),
                     view_of(errors_.at(name), Dtype::kF32).slice(range.flat_offset, range.count)});
    }
  }
  return all;
}

void FakeHop::load_state(std::span<const HopState> state) {
  for (const HopState& piece : state) {
    const auto* const values = static_cast<const float*>(piece.data.data);
    loaded_[piece.key] = std::vector(values, values + piece.data.count);
  }
}

}  // namespace hsdp::test
