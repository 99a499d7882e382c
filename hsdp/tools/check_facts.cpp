#include "hsdp/tools/check_facts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "hsdp/snapshot/snapshot_header.h"
#include "hsdp/tools/text_table.h"

namespace hsdp {
namespace {

std::string general(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*g", digits, value);
  return text.data();
}

std::string plural(std::int64_t count, const std::string& noun) {
  const char* ending = noun.ends_with("ch") ? "es" : "s";
  return count_text(count) + " " + noun + (count == 1 ? "" : ending);
}

// Says what is wrong with the worst parameter, and where.
std::string worst_text(const Comparison& comparison, const ParameterDifference& worst) {
  std::string text = "; worst '" + printable(worst.name) + "': ";
  if (worst.nonfinite_mismatches != 0) {
    text += plural(worst.nonfinite_mismatches, "NaN or infinity mismatch");
  } else if (comparison.criterion == Criterion::kRelative) {
    text += "relative L2 " + number_text(worst.relative_l2) + ", max|a-b|/max|b| " +
            number_text(worst.max_relative);
  } else if (comparison.criterion == Criterion::kUlp) {
    text += ulp_text(worst.max_ulp) + " ULP";
  } else {
    text += plural(worst.failing, "element") + ", max|a-b| " + number_text(worst.max_absolute);
  }
  if (worst.worst.index < 0) return text;
  return text + ", at " + position_text(worst.worst.index, worst.shape) + " " +
         value_text(worst.worst.a) + " against " + value_text(worst.worst.b);
}

}  // namespace

ExitStatus exit_status(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSame:
      return ExitStatus::kSame;
    case Verdict::kDifferent:
      return ExitStatus::kDifferent;
    case Verdict::kNotJudged:
      break;
  }
  return ExitStatus::kCannotTell;
}

std::string to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSame:
      return "same";
    case Verdict::kDifferent:
      return "different";
    case Verdict::kNotJudged:
      break;
  }
  return "not judged";
}

std::string to_string(Criterion criterion) {
  switch (criterion) {
    case Criterion::kTolerance:
      return "tolerance";
    case Criterion::kUlp:
      return "ulp";
    case Criterion::kBitwise:
      return "bitwise";
    case Criterion::kRelative:
      break;
  }
  return "relative";
}

std::string position_text(std::int64_t index, const Shape& shape) {
  if (index < 0) return "-";
  std::string text;
  for (std::size_t i = shape.size(); i-- > 0;) {
    text = std::to_string(index % shape[i]) + (text.empty() ? "" : ", ") + text;
    index /= shape[i];
  }
  return "[" + text + "]";
}

std::string number_text(double value) {
  if (value == 0) return "0";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.2e", value);
  return text.data();
}

std::string ulp_text(double value) { return general(value, 3); }

std::string value_text(double value) { return general(value, 9); }

std::string run_text(const SnapshotInfo& info) {
  std::string text = info.reducer.empty() ? "" : "reducer '" + printable(info.reducer) + "', ";
  text += "step " + std::to_string(info.step) + ", ";
  if (info.layout == "full") {
    text += "whole arrays";
  } else {
    text += std::to_string(info.replicate_size) + "x" + std::to_string(info.shard_size) + " " +
            info.layout;
  }
  if (info.partial) text += ", partial";
  text += ", " + std::to_string(info.microbatch_count) +
          (info.microbatch_count == 1 ? " microbatch" : " microbatches");
  if (info.replicate_size > 1 && !info.partial && info.layout != "full") {
    text += ", " + printable(info.replica_hop) + " hop";
    if (info.replica_dtype) text += " " + std::string(name(*info.replica_dtype));
  }
  if (info.reduction != "exact") text += ", " + printable(info.reduction) + " reduction";
  return text;
}

std::string criterion_text(const Comparison& comparison) {
  switch (comparison.criterion) {
    case Criterion::kTolerance:
      return "|a-b| <= " + general(comparison.atol, 6) + " + " + general(comparison.rtol, 6) +
             " |b|";
    case Criterion::kUlp:
      return "at most " + general(comparison.ulp, 6) + " ULP of the coarser dtype";
    case Criterion::kBitwise:
      return "equal bits";
    case Criterion::kRelative:
      break;
  }
  std::string text = "relative L2 and max|a-b| / max|b| at most ";
  std::string limits;
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    const bool used = std::any_of(
        comparison.parameters.begin(), comparison.parameters.end(), [&](const auto& parameter) {
          return parameter.coarsest == dtype ||
                 (dtype == Dtype::kF32 && parameter.limit == default_limit(dtype));
        });
    if (!used) continue;
    limits += (limits.empty() ? "2^" : ", 2^") + std::to_string(std::ilogb(default_limit(dtype))) +
              " (" + std::string(name(dtype)) + ")";
  }
  return text + limits;
}

std::int64_t total_count(const Comparison& comparison) {
  return std::accumulate(comparison.parameters.begin(), comparison.parameters.end(),
                         std::int64_t{0},
                         [](std::int64_t sum, const auto& p) { return sum + p.count; });
}

std::int64_t different_count(const Comparison& comparison) {
  return std::count_if(comparison.parameters.begin(), comparison.parameters.end(),
                       [](const auto& p) { return p.verdict == Verdict::kDifferent; });
}

std::string verdict_text(const Comparison& comparison) {
  const auto parameters = static_cast<std::int64_t>(comparison.parameters.size());
  const std::string all =
      plural(parameters, "parameter") + ", " + plural(total_count(comparison), "element");
  if (comparison.verdict == Verdict::kSame) return "same: " + all;
  const ParameterDifference& worst = comparison.parameters.front();
  if (comparison.verdict == Verdict::kNotJudged) {
    return "not judged: " + all + worst_text(comparison, worst) +
           "; LoCo ran: give --rtol, --atol or --ulp to judge";
  }
  return "different: " + count_text(different_count(comparison)) + " of " +
         plural(parameters, "parameter") + worst_text(comparison, worst);
}

std::string verdict_text(const Validation& validation) {
  const auto parameters = static_cast<std::int64_t>(validation.parameters.size());
  if (validation.sound()) {
    std::string text = "sound: " + plural(parameters, "parameter");
    if (validation.info.partial) {
      text += ", partials of " + plural(validation.copy_count, "replica");
    } else if (validation.copy_count > 1) {
      text += ", " + count_text(validation.copy_count) + " replicas bitwise equal";
    }
    return text;
  }
  const ParameterCheck& first = validation.parameters.front();
  const auto unsound = std::count_if(validation.parameters.begin(), validation.parameters.end(),
                                     [](const auto& p) { return !p.sound(); });
  std::string text = "unsound: " + count_text(unsound) + " of " + plural(parameters, "parameter") +
                     "; '" + printable(first.name) + "': ";
  if (first.nonfinite != 0) {
    return text + plural(first.nonfinite, "NaN or infinite element") + ", the first at " +
           position_text(first.first_nonfinite, first.shape);
  }
  return text + "replica " + std::to_string(first.unequal_copy) + " differs from replica 0 at " +
         position_text(first.first_unequal, first.shape);
}

}  // namespace hsdp
