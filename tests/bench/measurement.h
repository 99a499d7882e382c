// What all benchmark programs share: cases, input values, the check against float64, the timing and
// the one line in which a program reports. Knows no library under test, so that peers link it too.
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

// `bytes` of input on each rank. Written op:dtype:bytes on the command line, for example
// all_reduce:f32:1048576.
struct Case {
  Op op = Op::kAllReduce;
  Dtype dtype = Dtype::kF32;
  std::int64_t bytes = 0;
  [[nodiscard]] std::int64_t count() const;
};

struct Arguments {
  std::vector<Case> cases;
  std::vector<std::string> flags;  // what starts with "--"
  [[nodiscard]] bool has(const std::string& flag) const;
  // The value of --name=value, or `otherwise`.
  [[nodiscard]] std::string value(const std::string& name, const std::string& otherwise) const;
};
// Prints to stderr and ends the process on what it does not understand.
[[nodiscard]] Arguments parse_arguments(int argc, char** argv);

// The ranks of this run. `max` is the largest value over the ranks, on every rank.
struct Group {
  std::string system;
  int rank = 0;
  int size = 1;
  std::function<void()> barrier;
  std::function<double(double)> max;
};

// Keeps this process on core rank % cores: the same for every system.
void pin_to_core(int rank);

// k / 128 with |k| <= 128: exact in every gradient dtype, and any fp32 sum of them is exact, so a
// right result equals the float64 sum in every order of addition.
[[nodiscard]] float input_value(std::int64_t index, int rank);
[[nodiscard]] double expected_sum(std::int64_t index, int ranks);
void write_value(void* data, std::int64_t index, Dtype dtype, float value);
[[nodiscard]] double read_value(const void* data, std::int64_t index, Dtype dtype);
// input_value(begin + i, rank) for i < count.
void fill_input(void* data, Dtype dtype, std::int64_t begin, std::int64_t count, int rank);
// Element i is the sum of input_value(begin + i, r) over `ranks` ranks, rounded once to `dtype`.
[[nodiscard]] bool holds_sum(const void* data, Dtype dtype, std::int64_t begin, std::int64_t count,
                             int ranks);

// One collective on memory of its own.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual void fill() = 0;                        // fresh inputs
  virtual void run() = 0;                         // collective
  [[nodiscard]] virtual bool verify() const = 0;  // after fill() and one run()
  virtual void clear() = 0;  // zeros, so that repeated runs in place stay finite
};

// The usual one: `input` and `output` may be the same memory.
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

// Touched, page-aligned memory.
[[nodiscard]] std::shared_ptr<void> private_memory(std::int64_t size_bytes);

// Checks, warms up, times batches of calls between barriers, checks again, and prints the line on
// rank 0. The time of a batch is that of its slowest rank; the median over batches counts.
void measure(const Group& group, const std::string& variant, const Case& what,
             Operation& operation);
[[nodiscard]] double now_us();
[[nodiscard]] double median_us(const Group& group, const std::function<void()>& call);
void report(const Group& group, const std::string& variant, const Case& what, double time_us,
            bool checked);

}  // namespace hsdp::bench
