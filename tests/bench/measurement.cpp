#include "measurement.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace hsdp::bench {
namespace {

constexpr double kBatchUs = 20'000.0;
constexpr double kBudgetUs = 300'000.0;
constexpr int kMaxBatchCalls = 500;
constexpr int kMaxBatches = 5;

[[noreturn]] void refuse(const std::string& argument) {
  std::fprintf(stderr, "bench: argument: expected op:dtype:bytes or --flag, got %s\n",
               argument.c_str());
  std::exit(2);
}

Case parse_case(const std::string& text) {
  const std::size_t first = text.find(':');
  const std::size_t second = text.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos) refuse(text);
  Case parsed;
  const std::string op = text.substr(0, first);
  const std::string dtype = text.substr(first + 1, second - first - 1);
  if (op != "reduce_scatter" && op != "all_reduce") refuse(text);
  parsed.op = op == "reduce_scatter" ? Op::kReduceScatter : Op::kAllReduce;
  if (dtype != "f32" && dtype != "bf16" && dtype != "f16") refuse(text);
  parsed.dtype = dtype == "f32" ? Dtype::kF32 : dtype == "bf16" ? Dtype::kBf16 : Dtype::kF16;
  parsed.bytes = std::atoll(text.c_str() + second + 1);
  if (parsed.bytes <= 0) refuse(text);
  return parsed;
}

const char* name_of(Dtype dtype) {
  return dtype == Dtype::kF32 ? "f32" : dtype == Dtype::kBf16 ? "bf16" : "f16";
}

}  // namespace

std::int64_t Case::count() const { return bytes / (dtype == Dtype::kF32 ? 4 : 2); }

bool Arguments::has(const std::string& flag) const {
  return std::find(flags.begin(), flags.end(), flag) != flags.end();
}

std::string Arguments::value(const std::string& name, const std::string& otherwise) const {
  const std::string prefix = "--" + name + "=";
  for (const std::string& flag : flags) {
    if (flag.compare(0, prefix.size(), prefix) == 0) return flag.substr(prefix.size());
  }
  return otherwise;
}

Arguments parse_arguments(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.compare(0, 2, "--") == 0) {
      arguments.flags.push_back(text);
    } else {
      arguments.cases.push_back(parse_case(text));
    }
  }
  return arguments;
}

void pin_to_core(int rank) {
  const auto cores = std::max(1U, std::thread::hardware_concurrency());
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(rank) % cores, &set);
  sched_setaffinity(0, sizeof(set), &set);  // if a container refuses, no process is pinned
}

float input_value(std::int64_t index, int rank) {
  const std::uint64_t mixed =
      (static_cast<std::uint64_t>(index) + static_cast<std::uint64_t>(rank) * 0x1000003U + 1U) *
      0x9e3779b97f4a7c15U;
  return static_cast<float>(static_cast<int>(mixed >> 56U) - 128) / 128.0F;
}

double expected_sum(std::int64_t index, int ranks) {
  double sum = 0.0;
  for (int rank = 0; rank < ranks; ++rank) sum += static_cast<double>(input_value(index, rank));
  return sum;
}

void write_value(void* data, std::int64_t index, Dtype dtype, float value) {
  switch (dtype) {
    case Dtype::kBf16:
      static_cast<Bf16*>(data)[index] = to_bf16(value);
      break;
    case Dtype::kF16:
      static_cast<F16*>(data)[index] = to_f16(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

double read_value(const void* data, std::int64_t index, Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return static_cast<double>(to_float(static_cast<const Bf16*>(data)[index]));
    case Dtype::kF16:
      return static_cast<double>(to_float(static_cast<const F16*>(data)[index]));
    default:
      return static_cast<double>(static_cast<const float*>(data)[index]);
  }
}

void fill_input(void* data, Dtype dtype, std::int64_t begin, std::int64_t count, int rank) {
  for (std::int64_t i = 0; i < count; ++i) {
    write_value(data, i, dtype, input_value(begin + i, rank));
  }
}

bool holds_sum(const void* data, Dtype dtype, std::int64_t begin, std::int64_t count, int ranks) {
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    float rounded = 0.0F;
    write_value(&rounded, 0, dtype, static_cast<float>(expected_sum(begin + i, ranks)));
    wrong += read_value(data, i, dtype) != read_value(&rounded, 0, dtype) ? 1 : 0;
  }
  return wrong == 0;
}

void ArrayOperation::fill() {
  fill_input(input_.data, input_.dtype, input_.begin, input_.count, group_.rank);
}

bool ArrayOperation::verify() const {
  return holds_sum(output_.data, output_.dtype, output_.begin, output_.count, group_.size);
}

void ArrayOperation::clear() {
  std::memset(input_.data, 0,
              static_cast<std::size_t>(input_.count) * (input_.dtype == Dtype::kF32 ? 4U : 2U));
}

std::shared_ptr<void> private_memory(std::int64_t size_bytes) {
  constexpr std::size_t kPage = std::size_t{2} << 20U;
  const std::size_t size = (static_cast<std::size_t>(size_bytes) + kPage - 1) / kPage * kPage;
  std::shared_ptr<void> memory(std::aligned_alloc(kPage, size), std::free);
  if (!memory) {
    std::fprintf(stderr, "bench: memory: expected %zu bytes, got none\n", size);
    std::exit(1);
  }
  std::memset(memory.get(), 0, size);
  return memory;
}

double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double median_us(const Group& group, const std::function<void()>& call) {
  const auto time_batch = [&](int calls) {
    group.barrier();
    const double start = now_us();
    for (int i = 0; i < calls; ++i) call();
    return group.max((now_us() - start) / calls);
  };
  time_batch(1);
  const double guess_us = std::max(0.1, time_batch(2));
  const int calls = std::clamp(static_cast<int>(kBatchUs / guess_us), 1, kMaxBatchCalls);
  const int batches = std::clamp(static_cast<int>(kBudgetUs / (guess_us * calls)), 3, kMaxBatches);
  std::vector<double> times;
  for (int batch = 0; batch < batches; ++batch) times.push_back(time_batch(calls));
  const auto middle = times.begin() + batches / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

void report(const Group& group, const std::string& variant, const Case& what, double time_us,
            bool checked) {
  if (group.rank != 0) return;
  std::printf("bench %s %s %s %s %lld %d %.3f %d\n", group.system.c_str(), variant.c_str(),
              what.op == Op::kAllReduce ? "all_reduce" : "reduce_scatter", name_of(what.dtype),
              static_cast<long long>(what.bytes), group.size, time_us, checked ? 1 : 0);
  std::fflush(stdout);
}

void measure(const Group& group, const std::string& variant, const Case& what,
             Operation& operation) {
  const auto right = [&] {
    operation.fill();
    group.barrier();
    operation.run();
    return group.max(operation.verify() ? 0.0 : 1.0) == 0.0;
  };
  const bool right_before = right();
  operation.clear();
  const double time_us = median_us(group, [&] { operation.run(); });
  const bool right_after = right();
  report(group, variant, what, time_us, right_before && right_after);
}

}  // namespace hsdp::bench
