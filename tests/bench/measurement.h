// What all benchmark programs share: cases, input values, the check against float64, the timing,
// and the line in which a program reports a time. It uses no library under test, so that peers can
// link it, too.
//
//   bench <system> <variant> <op> <dtype> <bytes> <ranks> <median_us> <checked>
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/dtype.h"

namespace hsdp::bench {

enum class Op : std::uint8_t { kReduceScatter, kAllReduce };

// A collective with `bytes` of input on each rank. On the command line it is op:dtype:bytes, for
// example all_reduce:f32:1048576.
struct Case {
  Op op = Op::kAllReduce;
  Dtype dtype = Dtype::kF32;
  std::int64_t bytes = 0;
  [[nodiscard]] std::int64_t count() const;
};

struct Arguments {
  std::vector<Case> cases;
  std::vector<std::string> flags;  // the arguments that start with "--"
  [[nodiscard]] bool has(const std::string& flag) const;
  // The value of --name=value, or `otherwise`.
  [[nodiscard]] std::string value(const std::string& name, const std::string& otherwise) const;
};
// On bad usage, prints to stderr and ends the process.
[[nodiscard]] Arguments parse_arguments(int argc, char** argv);

// The ranks of this run. `max` returns the largest value of all ranks, on every rank.
struct Group {
  std::string system;
  int rank = 0;
  int size = 1;
  std::function<void()> barrier;
  std::function<double(double)> max;
};

// Pins this process to core rank % cores, for every system alike.
void pin_to_core(int rank);

// Returns k / 128 with |k| <= 128. It is exact in every gradient dtype, and so is any fp32 sum, so
// a right result equals the float64 sum in every order of addition.
[[nodiscard]] float input_value(std::int64_t index, int rank);
[[nodiscard]] double expected_sum(std::int64_t index, int ranks);
void write_value(void* data, std::int64_t index, Dtype dtype, float value);
[[nodiscard]] double read_value(const void* data, std::int64_t index, Dtype dtype);
// Writes input_value(begin + i, rank) for i < count.
void fill_input(void* data, Dtype dtype, std::int64_t begin, std::int64_t count, int rank);
// Whether each element i is the sum of input_value(begin + i, r) over `ranks` ranks, rounded once
// to `dtype`.
[[nodiscard]] bool holds_sum(const void* data, Dtype dtype, std::int64_t begin, std::int64_t count,
                             int ranks);

// One collective, which owns its memory.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual void fill() = 0;                        // writes fresh inputs
  virtual void run() = 0;                         // collective
  [[nodiscard]] virtual bool verify() const = 0;  // after fill() and one run()
  virtual void clear() = 0;  // writes zeros, so that repeated runs in place stay finite
};

// An operation on two arrays. `input` and `output` may be the same memory.
class ArrayOperation : public Operation {
 public:
  struct Array {
    std::shared_ptr<void> owner;
    void* data = nullptr;
    Dtype dtype = Dtype::kF32;
    std::int64_t begin = 0;  // logical index of its first element
    std::int64_t count = 0;
  };
  ArrayOperation(const Group& group, Array input, Array output, std::function<void()> run)
      : group_(group), input_(std::move(input)), output_(std::move(output)), run_(std::move(run)) {}
  void fill() override;
  void run() override { run_(); }
  [[nodiscard]] bool verify() const override;
  void clear() override;

 private:
  const Group& group_;
  Array input_;
  Array output_;
  std::function<void()> run_;
};

// Allocates page-aligned memory and touches it.
[[nodiscard]] std::shared_ptr<void> private_memory(std::int64_t size_bytes);

// Checks the result, warms up, times batches of calls between barriers, checks again, and prints
// the line on rank 0. A batch takes as long as its slowest rank; the line has the median batch.
void measure(const Group& group, const std::string& variant, const Case& what,
             Operation& operation);
[[nodiscard]] double now_us();
[[nodiscard]] double median_us(const Group& group, const std::function<void()>& call);
void report(const Group& group, const std::string& variant, const Case& what, double time_us,
            bool checked);

}  // namespace hsdp::bench
