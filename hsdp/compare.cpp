#include "hsdp/compare.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <unordered_map>

#include "hsdp/error.h"
#include "hsdp/snapshot/copy_checker.h"
#include "hsdp/snapshot/difference.h"
#include "hsdp/snapshot/parameter_reader.h"
#include "hsdp/snapshot/pieces.h"
#include "hsdp/snapshot/snapshot_header.h"
#include "hsdp/snapshot/verdict.h"
#include "hsdp/snapshot/worker_pieces.h"

namespace hsdp {
namespace {

constexpr std::size_t kMaxNamed = 5;  // limit for messages

[[noreturn]] void refuse(const std::string& reason) { throw SnapshotError("compare: " + reason); }

void check_limit(const char* option, std::optional<double> value) {
  if (value && !(*value >= 0 && std::isfinite(*value))) {
    throw UsageError({.where = "compare",
                      .expected = std::string(option) + " finite and at least 0",
                      .got = std::to_string(*value)});
  }
}

Criterion choose_criterion(const CompareOptions& options) {
  check_limit("rtol", options.rtol);
  check_limit("atol", options.atol);
  check_limit("ulp", options.ulp);
  const bool tolerance = options.rtol || options.atol;
  if ((tolerance ? 1 : 0) + (options.ulp ? 1 : 0) + (options.bitwise ? 1 : 0) > 1) {
    throw UsageError({.where = "compare",
                      .expected = "one of rtol and atol, ulp, bitwise",
                      .got = "several",
                      .remedy = "choose one"});
  }
  if (options.bitwise) return Criterion::kBitwise;
  if (options.ulp) return Criterion::kUlp;
  return tolerance ? Criterion::kTolerance : Criterion::kRelative;
}

void check_kinds(const Snapshot& a, const Snapshot& b) {
  const SnapshotInfo& x = a.info();
  const SnapshotInfo& y = b.info();
  if (x.partial != y.partial) {
    refuse("a partial against a result: " + printable((x.partial ? a : b).path().string()) +
           " holds sums of one shard group, the other the mean over all replicas");
  }
  if (x.partial && x.replicate_size != y.replicate_size) {
    refuse("partials differ by replica and need equal replicate sizes, got " +
           std::to_string(x.replicate_size) + " and " + std::to_string(y.replicate_size));
  }
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kMaxNamed; ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kMaxNamed)
    text += ", and " + std::to_string(names.size() - kMaxNamed) + " more";
  return text;
}

// The number in b of each parameter of a. Throws, naming the differences, unless both have the same
// names and shapes.
std::vector<std::size_t> match_parameters(const Snapshot& a, const Snapshot& b) {
  std::unordered_map<std::string, std::size_t> numbers;
  for (std::size_t i = 0; i < b.parameters().size(); ++i) numbers[b.parameters()[i].name] = i;
  std::vector<std::size_t> matches;
  std::vector<std::string> only_a;
  std::vector<std::string> only_b;
  std::vector<std::string> shapes;
  for (const SnapshotParameter& parameter : a.parameters()) {
    const auto found = numbers.find(parameter.name);
    if (found == numbers.end()) {
      only_a.push_back(printable(parameter.name));
      continue;
    }
    const Shape& other = b.parameters()[found->second].shape;
    if (other != parameter.shape) {
      shapes.push_back(printable(parameter.name) + " " + to_string(parameter.shape) + " and " +
                       to_string(other));
    }
    matches.push_back(found->second);
    numbers.erase(found);
  }
  for (const SnapshotParameter& parameter : b.parameters()) {
    if (numbers.count(parameter.name) != 0) only_b.push_back(printable(parameter.name));
  }
  std::string reason;
  if (!only_a.empty()) reason += "; only in the first: " + join(only_a);
  if (!only_b.empty()) reason += "; only in the second: " + join(only_b);
  if (!shapes.empty()) reason += "; shapes: " + join(shapes);
  if (!reason.empty()) refuse("the parameters differ" + reason);
  return matches;
}

struct PairedParameter {
  std::size_t a = 0;
  std::size_t b = 0;
  ElementRule rule;
};

// One snapshot as read by one thread.
class Side {
 public:
  explicit Side(const Snapshot& snapshot)
      : reader_(snapshot), checker_(snapshot), divisor_(stored_divisor(snapshot.info())) {}

  [[nodiscard]] const SnapshotParameter& parameter(std::size_t number) const {
    return reader_.snapshot().parameters()[number];
  }
  [[nodiscard]] bool is_wide(std::size_t number) const {
    return reader_.stored_dtype(number) == Dtype::kF64;
  }
  [[nodiscard]] StoredElements read(std::size_t number, int copy, std::int64_t begin) {
    return reader_.read(number, copy, begin);
  }

  // `stored` as mean gradients: in place if they already are, otherwise in `scratch`.
  template <class T>
  std::span<const T> values(const StoredElements& stored, std::vector<T>& scratch) const {
    const auto count = static_cast<std::size_t>(stored.count);
    if (stored.dtype == Dtype::kF32 && sizeof(T) == sizeof(float) && divisor_ == 1.0) {
      return {reinterpret_cast<const T*>(stored.data), count};
    }
    scratch.resize(count);
    convert(stored, divisor_, std::span<T>(scratch));
    return scratch;
  }

  void check_copies(std::size_t number, std::int64_t begin, const StoredElements& first) {
    const auto unequal = checker_.check(number, begin, first);
    if (!unequal) return;
    refuse("the replicas of " + printable(reader_.snapshot().path().string()) +
           " are not the same: '" + printable(parameter(number).name) + "' element " +
           std::to_string(unequal->index) + " differs between copies 0 and " +
           std::to_string(unequal->copy));
  }

 private:
  ParameterReader reader_;
  CopyChecker checker_;
  double divisor_;
};

// The state of one thread; never shared.
class PieceComparer {
 public:
  PieceComparer(const Snapshot& a, const Snapshot& b) : a_(a), b_(b) {}

  Difference compare(const PairedParameter& pair, const Piece& piece, bool detail) {
    return a_.is_wide(pair.a) || b_.is_wide(pair.b) ? compare_as<double>(pair, piece, detail)
                                                    : compare_as<float>(pair, piece, detail);
  }

 private:
  template <class T>
  Difference compare_as(const PairedParameter& pair, const Piece& piece, bool detail) {
    DifferenceMeter meter(pair.rule, a_.parameter(pair.a).count, detail);
    std::vector<T> scratch_a;
    std::vector<T> scratch_b;
    for (std::int64_t at = piece.begin; at < piece.end;) {
      StoredElements a = a_.read(pair.a, piece.replica, at);
      StoredElements b = b_.read(pair.b, piece.replica, at);
      a.count = b.count = std::min({a.count, b.count, piece.end - at});
      meter.add<T>(at, piece.replica, a_.values(a, scratch_a), b_.values(b, scratch_b));
      a_.check_copies(pair.a, at, a);
      b_.check_copies(pair.b, at, b);
      at += a.count;
    }
    return meter.result();
  }

  Side a_;
  Side b_;
};

class SnapshotComparer {
 public:
  SnapshotComparer(const Snapshot& a, const Snapshot& b, const CompareOptions& options)
      : a_(a), b_(b), options_(options) {
    result_.path_a = a.path();
    result_.path_b = b.path();
    result_.a = a.info();
    result_.b = b.info();
    result_.criterion = choose_criterion(options);
    result_.rtol = options.rtol.value_or(0);
    result_.atol = options.atol.value_or(0);
    result_.ulp = options.ulp.value_or(0);
    check_kinds(a, b);
    pair_parameters(match_parameters(a, b));
  }

  Comparison compare() {
    measure();
    const bool judged = result_.criterion != Criterion::kRelative ||
                        !(is_quantized(result_.a) || is_quantized(result_.b));
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      judge(differences_[i], result_.criterion, judged, result_.parameters[i]);
    }
    std::stable_sort(result_.parameters.begin(), result_.parameters.end(),
                     [](const auto& x, const auto& y) { return is_worse(x, y); });
    result_.verdict = judged ? Verdict::kSame : Verdict::kNotJudged;
    if (!result_.parameters.empty() && result_.parameters.front().verdict == Verdict::kDifferent) {
      result_.verdict = Verdict::kDifferent;
    }
    return std::move(result_);
  }

 private:
  void pair_parameters(const std::vector<std::size_t>& matches) {
    const ParameterReader stored_a(a_);
    const ParameterReader stored_b(b_);
    for (std::size_t i = 0; i < matches.size(); ++i) {
      const SnapshotParameter& a = a_.parameters()[i];
      const SnapshotParameter& b = b_.parameters()[matches[i]];
      ParameterDifference& result = result_.parameters.emplace_back();
      result.name = a.name;
      result.shape = a.shape;
      result.count = a.count;
      result.coarsest =
          coarser(coarser(coarsest_wire(a_.info(), a), coarsest_wire(b_.info(), b)),
                  coarser(stored_a.stored_dtype(i), stored_b.stored_dtype(matches[i])));
      result.limit = default_limit(result.coarsest);
      pairs_.push_back({i,
                        matches[i],
                        {result_.criterion, result_.rtol, result_.atol, result_.ulp,
                         ulp_spacing(result.coarsest)}});
    }
    differences_.resize(pairs_.size());
  }

  void measure() {
    const auto pieces =
        cut_into_pieces(a_.parameters(), result_.a.partial ? result_.a.replicate_size : 1);
    const auto total = static_cast<double>(total_elements(pieces));
    double done = 0;
    run_pieces(pieces.size(), options_.thread_count, [&] {
      const auto comparer = std::make_shared<PieceComparer>(a_, b_);
      return [&, comparer](std::size_t number) -> PieceTaker {
        const Piece& piece = pieces[number];
        return
            [&, difference = comparer->compare(pairs_[piece.parameter], piece, options_.detail)] {
              differences_[piece.parameter].merge(difference);
              done += static_cast<double>(piece.end - piece.begin);
              if (options_.progress) options_.progress(done / total);
            };
      };
    });
  }

  const Snapshot& a_;
  const Snapshot& b_;
  const CompareOptions& options_;
  std::vector<PairedParameter> pairs_;
  std::vector<Difference> differences_;
  Comparison result_;
};

}  // namespace

Comparison compare_snapshots(const Snapshot& a, const Snapshot& b, const CompareOptions& options) {
  return SnapshotComparer(a, b, options).compare();
}

}  // namespace hsdp
