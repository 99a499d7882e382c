// A replica hop with everything that a quantizing one needs, and arithmetic that a test can repeat:
// codes of one byte are multiples of kStep, and the rounding error is added to the next step's
// gradient.
//
// The codec and the wires have threads, so buckets overlap: while one is on a wire the next is
// coded. Host only.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "hsdp/replica_hop.h"

namespace hsdp::test {

class FakeHop final : public ReplicaHop {
 public:
  static constexpr float kStep = 0.5F;

  struct Options {
    std::set<std::string> excluded;  // sent as fp32, in separate buckets
    std::int64_t slice_multiple = 8;
    std::string name = "fake";
    std::string word = "same";
    // Called where a failure can be planted: "describe", "prepare", "word", "reduce", "codec",
    // "end_step".
    std::function<void(std::string_view place)> on = [](std::string_view) {};
  };
  explicit FakeHop(Options options) : options_(std::move(options)) {}
  FakeHop() : FakeHop(Options{}) {}

  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string word() const override;
  [[nodiscard]] bool quantizes() const override { return true; }
  [[nodiscard]] std::int64_t slice_multiple() const override { return options_.slice_multiple; }
  [[nodiscard]] int bucket_class(const HopParameter& parameter) const override;
  void prepare(const HopPlan& plan) override;
  void bind(Communicator scatter, Communicator gather) override;
  [[nodiscard]] bool means(int bucket, double /*mean_divisor*/) const override {
    return !is_excluded(bucket);
  }
  Event reduce(const HopBucket& bucket, Stream& stream) override;
  void end_step(const StepEnd& end) override;
  [[nodiscard]] std::vector<HopState> state() override;
  void load_state(std::span<const HopState> state) override;  // before prepare() only

  [[nodiscard]] const HopPlan& plan() const { return *plan_; }
  [[nodiscard]] std::vector<StepEnd> ends() const { return ends_; }
  [[nodiscard]] int most_in_flight() const { return most_in_flight_; }

 private:
  // By parameter: the elements of the whole parameter that lie in this rank's slice.
  using Errors = std::map<std::string, std::vector<float>>;
  struct Exchange;

  [[nodiscard]] bool is_excluded(int bucket) const;
  [[nodiscard]] const std::vector<ParameterRange>& ranges(int bucket) const {
    return plan_->ranges[static_cast<std::size_t>(bucket)];
  }
  [[nodiscard]] const HopParameter& parameter(const ParameterRange& range) const {
    return plan_->parameters[static_cast<std::size_t>(range.parameter)];
  }
  void finish_streams();
  void encode(Exchange& exchange);
  void count(int change);

  Options options_;
  const HopPlan* plan_ = nullptr;
  Communicator scatter_;
  Communicator gather_;
  Stream codec_ = Stream::inline_host();  // threads after bind()
  Stream scatter_wire_ = Stream::inline_host();
  Stream gather_wire_ = Stream::inline_host();
  Errors errors_;                                     // after the last clean step
  Errors next_;                                       // in this step
  std::map<std::string, std::vector<float>> loaded_;  // by key
  MemoryCount::Held held_;
  std::vector<StepEnd> ends_;
  int in_flight_ = 0;
  int most_in_flight_ = 0;
  std::mutex mutex_;
};

// How steps 0, 1, ... ended.
[[nodiscard]] std::vector<StepOutcome> outcomes(const std::vector<StepEnd>& ends);

// What FakeHop makes of one element: takes each replica's shard sum, and updates its error.
[[nodiscard]] float fake_mean(const std::vector<float>& sums, float divisor,
                              std::vector<float>& errors);

}  // namespace hsdp::test
