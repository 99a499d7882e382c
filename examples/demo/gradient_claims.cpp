#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "examples/demo/claims.h"
#include "examples/demo/number_text.h"

namespace examples {
namespace {

constexpr int kSame = 0;
constexpr int kDifferent = 1;

struct CheckOutcome {
  int status = 0;
  std::string worst_parameter;
  double relative_l2 = 0;
};

// Compares the snapshot of one step of `run` with the gradient in float64, at that step's weights.
CheckOutcome check_step(const DemoOptions& options, const MeshRun& run, std::size_t step,
                        const std::string& report) {
  const std::filesystem::path folder = options.out / run.name;
  const std::string number = std::to_string(step);
  const std::string reference = (folder / ("float64_" + number + ".h5")).string();
  run_job({.arguments = {options.program("train_alone"), "--data", options.data.string(),
                         "--gradient-of-step", number, "--weights",
                         (folder / ("weights_" + number + ".f32")).string(), "--output", reference},
           .environment = {}});
  const JobOutcome check =
      Job({.arguments = {options.tool("hsdp_check"), (folder / ("step_" + number)).string(),
                         reference, "--json", "--html", report},
           .environment = {}},
          std::chrono::seconds(60))
          .wait();
  if (check.status != kSame && check.status != kDifferent) {
    throw std::runtime_error("hsdp_check ended with status " + std::to_string(check.status) +
                             "; it printed:\n" + check.output);
  }
  const nlohmann::json json = nlohmann::json::parse(check.output);
  const nlohmann::json& worst = json.at("parameters").at(0);
  return {.status = check.status,
          .worst_parameter = worst.at("name"),
          .relative_l2 = worst.at("relative_l2")};
}

}  // namespace

std::filesystem::path report_path(const DemoOptions& options, const std::string& name) {
  return options.out / (name + "_gradients.html");
}

Claim gradient_claim(const DemoOptions& options, const MeshRun& mesh) {
  Claim claim{.claim = "gradients against float64", .holds = true};
  CheckOutcome worst;
  std::string steps;
  for (const std::size_t step : mesh.snapshot_steps) {
    const CheckOutcome check = check_step(options, mesh, step, report_path(options, mesh.name));
    claim.holds = claim.holds && check.status == kSame;
    worst = check.relative_l2 > worst.relative_l2 ? check : worst;
    steps += (steps.empty() ? "" : ", ") + std::to_string(step);
  }
  claim.number = "hsdp_check: " + std::string(claim.holds ? "same" : "DIFFERENT") + " in steps " +
                 steps + ", within " + short_text(100 * worst.relative_l2, 2) + " %";
  return claim;
}

Claim wrong_order_claim(const DemoOptions& options, const MeshRun& wrong) {
  const CheckOutcome check =
      check_step(options, wrong, wrong.snapshot_steps.at(0), report_path(options, wrong.name));
  return {.claim = "bug on: summed after the all-reduce",
          .number = check.status == kDifferent
                        ? "hsdp_check: different, " + check.worst_parameter + " off by " +
                              fixed_text(100 * check.relative_l2, 0) + " %"
                        : "hsdp_check: same, though the sum is wrong",
          .holds = check.status == kDifferent && !check.worst_parameter.empty()};
}

}  // namespace examples
