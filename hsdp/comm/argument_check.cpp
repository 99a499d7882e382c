#include "hsdp/comm/argument_check.h"

#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

// Keeps sizes in bytes, and sums of two, within int64.
std::int64_t largest_count(Dtype dtype) {
  return std::numeric_limits<std::int64_t>::max() / 2 /
         static_cast<std::int64_t>(size_bytes(dtype));
}

// Checks for one operation: every message names it, the rank and the size.
class Checker {
 public:
  Checker(std::string_view operation, GroupShape group) : operation_(operation), group_(group) {}

  // Builds the texts only on failure: these checks run with every collective.
  [[noreturn]] void fail(std::string_view what, const std::string& expected,
                         const std::string& got) const {
    throw UsageError(std::string(operation_) + ": " + std::string(what) + ": expected " + expected +
                     ", got " + got + " (rank " + std::to_string(group_.rank) + " of " +
                     std::to_string(group_.size) + ")");
  }

  void view(ConstTensorView view, std::string_view what) const {
    if (view.count < 0) fail(what, "a count of at least 0", std::to_string(view.count));
    if (const std::int64_t most = largest_count(view.dtype); view.count > most)
      fail(what, "a count of at most " + std::to_string(most), std::to_string(view.count));
    if (view.count != 0 && view.data == nullptr) fail(what, "memory", "a null pointer");
    const auto address = reinterpret_cast<std::uintptr_t>(view.data);
    if (view.count != 0 && address % size_bytes(view.dtype) != 0)
      fail(what, "memory aligned to its elements", "an address that is not");
  }

  void count(std::int64_t got, std::int64_t expected, std::string_view what) const {
    if (got != expected) fail(what, std::to_string(expected) + " elements", std::to_string(got));
  }

  // Expects one row of `length` from each rank. The product of the two may overflow.
  void rows(std::int64_t got, std::int64_t length, std::string_view what) const {
    if (got % group_.size != 0 || got / group_.size != length)
      fail(what,
           std::to_string(group_.size) + " rows of " + std::to_string(length) + " elements each",
           std::to_string(got) + " elements");
  }

  void reducible(Dtype dtype) const {
    if (dtype == Dtype::kU8) fail("dtype", "f32, bf16, f16, f64 or i64", "u8, which only moves");
  }

  void same_device(Device a, Device b) const {
    if (a != b) fail("device", "one device, " + to_string(a), to_string(b));
  }

  void same_dtype(ConstTensorView in, TensorView out) const {
    if (in.dtype != out.dtype)
      fail("dtype of the output", std::string(name(in.dtype)), std::string(name(out.dtype)));
  }

  void divisor(double value, Dtype dtype) const {
    const double used = sums_in_f32(dtype) ? static_cast<float>(value) : value;
    if (!std::isfinite(used) || used == 0.0)
      fail("divisor", "a finite number, not 0", std::to_string(value));
    if (!is_gradient_dtype(dtype) && value != 1.0)
      fail("divisor", "1 for i64, which only adds", std::to_string(value));
  }

  void nonfinite(const void* flag, Dtype dtype) const {
    if (flag != nullptr && !is_gradient_dtype(dtype)) fail("nonfinite", "no flag for i64", "one");
  }

  void exponent(int value, std::string_view what) const {
    if (value < -126 || value > 126) fail(what, "-126 to 126", std::to_string(value));
  }

  void cut(const RowCut& cut, std::int64_t elements) const {
    if (cut.size() != group_.size)
      fail("cut", std::to_string(group_.size) + " rows", std::to_string(cut.size()));
    count(cut.count(), elements, "cut");
  }

  void apart(ConstTensorView in, TensorView out) const {
    const auto a = reinterpret_cast<std::uintptr_t>(in.data);
    const auto b = reinterpret_cast<std::uintptr_t>(out.data);
    const bool overlap =
        in.count > 0 && out.count > 0 && a < b + out.size_in_bytes() && b < a + in.size_in_bytes();
    if (overlap) fail("memory", "an output apart from the input", "memory that overlaps");
  }

 private:
  std::string_view operation_;
  GroupShape group_;
};

}  // namespace

void check(const ReduceScatter& args, GroupShape group) {
  const Checker checker("reduce_scatter", group);
  checker.view(args.in, "input");
  checker.view(args.out, "output");
  checker.same_device(args.in.device, args.out.device);
  checker.reducible(args.in.dtype);
  checker.cut(*args.cut, args.in.count);
  checker.count(args.out.count, args.cut->length(group.rank), "output");
  if (!sums_in_f32(args.in.dtype) || args.out.dtype != Dtype::kF32) {
    checker.same_dtype(args.in, args.out);
  }
  if (args.accumulate && args.out.dtype != Dtype::kF32 && args.out.dtype != Dtype::kF64)
    checker.fail("accumulate", "an f32 or f64 output", std::string(name(args.out.dtype)));
  checker.exponent(args.sum_exponent, "sum_exponent");
  if (args.sum_exponent != 0 && !sums_in_f32(args.in.dtype))
    checker.fail("sum_exponent", "0 for f64 and i64, which only add",
                 std::to_string(args.sum_exponent));
  checker.divisor(args.divisor, args.in.dtype);
  checker.nonfinite(args.nonfinite, args.in.dtype);
  checker.apart(args.in, args.out);
}

void check(const AllReduce& args, GroupShape group) {
  const Checker checker("all_reduce", group);
  checker.view(args.data, "data");
  checker.reducible(args.data.dtype);
  const Dtype wire = args.wire.value_or(args.data.dtype);
  const bool narrows = args.data.dtype == Dtype::kF32 && sums_in_f32(wire);
  if (!narrows && wire != args.data.dtype)
    checker.fail("wire dtype", "the data's, or bf16 or f16 with f32 data", std::string(name(wire)));
  checker.exponent(args.send_exponent, "send_exponent");
  checker.exponent(args.total_exponent, "total_exponent");
  checker.exponent(args.total_exponent - args.send_exponent, "total_exponent - send_exponent");
  if (args.data.dtype != Dtype::kF32 && (args.send_exponent != 0 || args.total_exponent != 0))
    checker.fail("exponents", "0 unless f32 data is rounded on the wire", "others");
  checker.divisor(args.divisor, args.data.dtype);
  checker.nonfinite(args.nonfinite, args.data.dtype);
}

void check_all_gather(ConstTensorView in, TensorView out, const RowCut& cut, GroupShape group) {
  const Checker checker("all_gather", group);
  checker.view(in, "input");
  checker.view(out, "output");
  checker.same_device(in.device, out.device);
  checker.same_dtype(in, out);
  checker.cut(cut, out.count);
  checker.count(in.count, cut.length(group.rank), "input");
  if (in.data != out.slice(cut.begin(group.rank), 0).data) checker.apart(in, out);
}

void check_all_to_all(ConstTensorView in, TensorView out, const std::optional<RowCut>& cut,
                      GroupShape group) {
  const Checker checker("all_to_all", group);
  checker.view(in, "input");
  checker.view(out, "output");
  checker.same_device(in.device, out.device);
  checker.same_dtype(in, out);
  if (cut) {
    checker.cut(*cut, in.count);
  } else if (in.count % group.size != 0) {
    checker.fail("count", "a multiple of " + std::to_string(group.size) + ", or a cut",
                 std::to_string(in.count));
  }
  checker.rows(out.count, cut ? cut->length(group.rank) : in.count / group.size, "output");
  checker.apart(in, out);
}

void check_broadcast(TensorView data, int root, GroupShape group) {
  const Checker checker("broadcast", group);
  checker.view(data, "data");
  if (root < 0 || root >= group.size)
    checker.fail("root", "a rank from 0 to " + std::to_string(group.size - 1),
                 std::to_string(root));
}

void check_allocate(std::int64_t count, Dtype dtype, GroupShape group) {
  const Checker checker("allocate", group);
  const std::int64_t most = largest_count(dtype);
  if (count < 0 || count > most)
    checker.fail("count", "0 to " + std::to_string(most), std::to_string(count));
}

}  // namespace hsdp::comm
