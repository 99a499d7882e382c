#include "hsdp/validate.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "hsdp/snapshot/block_difference.h"
#include "hsdp/snapshot/copy_checker.h"
#include "hsdp/snapshot/parameter_reader.h"
#include "hsdp/snapshot/pieces.h"
#include "hsdp/snapshot/worker_pieces.h"

namespace hsdp {
namespace {

struct PieceCheck {
  double max_absolute = 0;
  long double squared = 0;
  std::int64_t nonfinite = 0;
  std::int64_t first_nonfinite = -1;
  std::int64_t first_unequal = -1;
  int unequal_copy = 0;
};

class PieceValidator {
 public:
  explicit PieceValidator(const Snapshot& snapshot)
      : reader_(snapshot), checker_(snapshot), divisor_(stored_divisor(snapshot.info())) {}

  PieceCheck validate(const Piece& piece) {
    PieceCheck check;
    for (std::int64_t at = piece.begin; at < piece.end;) {
      StoredElements stored = reader_.read(piece.parameter, piece.replica, at);
      stored.count = std::min(stored.count, piece.end - at);
      if (stored.dtype == Dtype::kF64) {
        measure(at, stored, doubles_, check);
      } else {
        measure(at, stored, floats_, check);
      }
      const auto unequal = checker_.check(piece.parameter, at, stored);
      if (unequal && check.first_unequal < 0) {
        check.first_unequal = unequal->index;
        check.unequal_copy = unequal->copy;
      }
      at += stored.count;
    }
    return check;
  }

 private:
  template <class T>
  void measure(std::int64_t begin, const StoredElements& stored, std::vector<T>& values,
               PieceCheck& check) const {
    values.resize(static_cast<std::size_t>(stored.count));
    convert(stored, divisor_, std::span<T>(values));
    const BlockDifference block =
        block_difference(values.data(), values.data(), values.size(), UlpSpacing());
    if (std::isfinite(block.sum_squared_a)) {
      check.max_absolute = std::max(check.max_absolute, block.max_a);
      check.squared += block.sum_squared_a;
      return;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<double>(values[i]);
      if (std::isfinite(value)) {
        check.max_absolute = std::max(check.max_absolute, std::abs(value));
        check.squared += static_cast<long double>(value) * static_cast<long double>(value);
      } else if (check.nonfinite++ == 0) {
        check.first_nonfinite = begin + static_cast<std::int64_t>(i);
      }
    }
  }

  ParameterReader reader_;
  CopyChecker checker_;
  double divisor_;
  std::vector<float> floats_;
  std::vector<double> doubles_;
};

// Pieces arrive in order, so the first finding stays. `squared` is kept apart, in long double.
void merge(const PieceCheck& piece, long double& squared, ParameterCheck& total) {
  total.max_absolute = std::max(total.max_absolute, piece.max_absolute);
  squared += piece.squared;
  total.nonfinite += piece.nonfinite;
  if (total.first_nonfinite < 0) total.first_nonfinite = piece.first_nonfinite;
  if (total.first_unequal < 0) {
    total.first_unequal = piece.first_unequal;
    total.unequal_copy = piece.unequal_copy;
  }
}

}  // namespace

Validation validate_snapshot(const Snapshot& snapshot, const ValidateOptions& options) {
  Validation result{snapshot.path(), snapshot.info(), snapshot.copy_count(), {}};
  for (const SnapshotParameter& parameter : snapshot.parameters()) {
    ParameterCheck& check = result.parameters.emplace_back();
    check.name = parameter.name;
    check.shape = parameter.shape;
    check.count = parameter.count;
  }
  const auto pieces =
      cut_into_pieces(snapshot.parameters(), snapshot.info().partial ? snapshot.copy_count() : 1);
  const auto total = static_cast<double>(total_elements(pieces));
  double done = 0;
  std::vector<long double> squared(result.parameters.size());
  run_pieces(pieces.size(), options.thread_count, [&] {
    const auto validator = std::make_shared<PieceValidator>(snapshot);
    return [&, validator](std::size_t number) -> PieceTaker {
      const Piece& piece = pieces[number];
      return [&, check = validator->validate(piece)] {
        merge(check, squared[piece.parameter], result.parameters[piece.parameter]);
        done += static_cast<double>(piece.end - piece.begin);
        if (options.progress) options.progress(done / total);
      };
    };
  });
  for (std::size_t i = 0; i < squared.size(); ++i) {
    result.parameters[i].norm = static_cast<double>(std::sqrt(squared[i]));
  }
  std::stable_partition(result.parameters.begin(), result.parameters.end(),
                        [](const ParameterCheck& check) { return !check.sound(); });
  return result;
}

}  // namespace hsdp
