#include <algorithm>
#include <cmath>
#include <set>

#include "examples/demo/claims.h"
#include "examples/demo/number_text.h"

namespace examples {
namespace {

constexpr double kGapLimit = 0.01;       // of losses that start at 2.3
constexpr double kAccuracyLimit = 0.01;  // 3 of 359 images
constexpr std::int64_t kMicrobatchCount = 4;

double largest_gap(const TrainingResult& a, const TrainingResult& b) {
  double gap = 0;
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    const double distance = std::abs(a.losses[i] - b.losses[i]);
    gap = std::max(gap, std::isnan(distance) ? INFINITY : distance);
  }
  return gap;
}

std::string per_step(std::int64_t count, std::size_t step_count) {
  return short_text(static_cast<double>(count) / static_cast<double>(step_count));
}

}  // namespace

Claim loss_claim(const TrainingResult& mesh, const TrainingResult& alone) {
  Claim claim{.claim = "loss beside a single process"};
  if (mesh.losses.empty() || mesh.losses.size() != alone.losses.size()) {
    claim.number = "the two took different numbers of steps";
    return claim;
  }
  const double gap = largest_gap(mesh, alone);
  const bool falls = mesh.losses.back() < 0.9 * mesh.losses.front();
  claim.number = fixed_text(mesh.losses.back(), 4) + " and " + fixed_text(alone.losses.back(), 4) +
                 " after " + std::to_string(mesh.losses.size()) + " steps, gap at most " +
                 fixed_text(gap, 4);
  claim.holds = falls && gap <= kGapLimit;
  return claim;
}

Claim accuracy_claim(const TrainingResult& mesh, const TrainingResult& alone) {
  return {.claim = "accuracy on images not trained on",
          .number = fixed_text(100 * mesh.test_accuracy, 1) + " % and " +
                    fixed_text(100 * alone.test_accuracy, 1) + " %",
          .holds = std::abs(mesh.test_accuracy - alone.test_accuracy) <= kAccuracyLimit};
}

Claim collectives_claim(const TrainingResult& mesh) {
  const std::int64_t bucket_count = mesh.bucket_count;
  const auto step_count = static_cast<std::int64_t>(mesh.losses.size());
  return {.claim = "collectives in a step",
          .number = std::to_string(bucket_count) + " buckets: " +
                    per_step(mesh.reduce_scatter_count, mesh.losses.size()) + " reduce-scatters, " +
                    per_step(mesh.all_reduce_count, mesh.losses.size()) + " all-reduces",
          .holds = bucket_count > 1 && step_count > 0 &&
                   mesh.reduce_scatter_count == kMicrobatchCount * bucket_count * step_count &&
                   mesh.all_reduce_count == bucket_count * step_count};
}

Claim same_bits_claim(const std::vector<TrainingResult>& runs) {
  std::set<std::string> hashes;
  std::set<std::string> transports;
  std::set<int> bucket_counts;
  for (const TrainingResult& run : runs) {
    hashes.insert(run.hash);
    transports.insert(run.transport);
    bucket_counts.insert(run.bucket_count);
  }
  Claim claim{.claim = "one result, to the bit"};
  for (const std::string& hash : hashes) {
    claim.number += (claim.number.empty() ? "" : ", ") + hash;
  }
  claim.number += ":";
  for (const std::string& transport : transports) {
    claim.number += (transport == *transports.begin() ? " " : " and ") + transport;
  }
  for (const int count : bucket_counts) {
    claim.number += (count == *bucket_counts.begin() ? ", " : " and ") + std::to_string(count);
  }
  claim.number += " buckets";
  claim.holds = hashes.size() == 1 && transports.size() == 2 && bucket_counts.size() == 2;
  return claim;
}

}  // namespace examples
