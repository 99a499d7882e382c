#include "tests/support/faulty_step.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "hsdp/error.h"

namespace hsdp::test {
namespace {

FaultReport report_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const StepAbortedError& error) {
    return {.text = error.what(), .ranks = error.ranks(), .step_aborted = true};
  } catch (const RankError&) {
    throw;  // the world ended: not what a dropped step is
  } catch (const UsageError& error) {
    return {.text = error.what(), .usage = true};
  } catch (const std::exception& error) {
    return {.text = error.what()};
  }
  return {};
}

void run_broken(Reducer& reducer, const FaultyStep& faulty, int rank) {
  const bool bad = faulty.bad_ranks.contains(rank);
  if (!bad) {
    run_step(reducer, faulty.step, rank);
    return;
  }
  for (int m = 0; m < faulty.microbatch; ++m) {
    run_microbatch(reducer, faulty.step, m, rank,
                   {.sync = faulty.step.schedule[static_cast<std::size_t>(m)]});
  }
  faulty.fault(reducer, rank);
}

}  // namespace

std::vector<FaultReport> run_faulty_step(MeshShape shape, const ReducerOptions& options,
                                         const FaultyStep& faulty, int repeat_count) {
  const auto size = static_cast<std::size_t>(shape.size());
  const StepCase clean = random_step(faulty.step.parameters, shape.size(),
                                     {Sync::kNone, Sync::kShard, Sync::kAll}, 77);
  std::vector<FaultReport> reports(size);
  std::vector<std::vector<RankResult>> results(static_cast<std::size_t>(repeat_count),
                                               std::vector<RankResult>(size));
  run_mesh(shape, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    Reducer reducer(mesh, options);
    register_all(reducer, clean);
    for (auto& result : results) {
      reports[rank] = report_of([&] { run_broken(reducer, faulty, mesh.rank()); });
      EXPECT_TRUE(caught<UsageError>([&] {
        static_cast<void>(reducer.shard(clean.parameters.front().name));
      })) << "a dropped step has a result on rank "
          << rank;
      result[rank] = run_step(reducer, clean, mesh.rank());
    }
  });
  for (const auto& result : results) {
    expect_reference(result, clean, options, shape, "after the broken step");
  }
  return reports;
}

void expect_aborted(const std::vector<FaultReport>& reports, const FaultyStep& faulty,
                    const std::string& text) {
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const FaultReport& report = reports[rank];
    if (faulty.bad_ranks.contains(static_cast<int>(rank))) {
      EXPECT_FALSE(report.step_aborted) << "bad rank " << rank << " lost its own error";
      continue;
    }
    EXPECT_TRUE(report.step_aborted) << "rank " << rank << " got: " << report.text;
    EXPECT_FALSE(report.ranks.empty());
    for (const int named : report.ranks) {
      EXPECT_TRUE(faulty.bad_ranks.contains(named)) << "names innocent rank " << named;
    }
    EXPECT_NE(report.text.find(text), std::string::npos) << report.text;
  }
}

}  // namespace hsdp::test
