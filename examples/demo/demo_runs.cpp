#include "examples/demo/demo_runs.h"

#include <set>

namespace examples {

std::string DemoOptions::program(const std::string& name) const {
  return (build / "examples" / name).string();
}

std::string DemoOptions::tool(const std::string& name) const {
  return (build / "hsdp" / "tools" / name).string();
}

std::vector<std::size_t> DemoOptions::snapshot_steps() const {
  const std::set<std::size_t> steps = {1, (step_count + 1) / 2, step_count};
  return {steps.begin(), steps.end()};
}

std::filesystem::path result_path(const DemoOptions& options, const std::string& name) {
  return options.out / (name + ".json");
}

JobCommand alone_command(const DemoOptions& options) {
  return {.arguments = {options.program("train_alone"), "--data", options.data.string(), "--steps",
                        std::to_string(options.step_count), "--result",
                        result_path(options, "alone").string()},
          .environment = {}};
}

JobCommand mesh_command(const DemoOptions& options, const MeshRun& run) {
  JobCommand command{
      .arguments = {options.tool("hsdp_run"), "-n", "4", options.program(run.program), "--data",
                    options.data.string(), "--steps", std::to_string(options.step_count),
                    "--result", result_path(options, run.name).string()},
      .environment = {{"HSDP_TRANSPORT", run.transport}}};
  if (run.program == "train_digits") {
    command.arguments.insert(command.arguments.end(), {"--bucket-bytes", run.bucket_bytes});
  }
  if (!run.snapshot_steps.empty()) {
    const std::filesystem::path folder = options.out / run.name;
    std::filesystem::create_directories(folder);
    command.arguments.insert(command.arguments.end(), {"--snapshots", folder.string()});
  }
  for (const std::size_t step : run.snapshot_steps) {
    command.arguments.insert(command.arguments.end(), {"--snapshot-step", std::to_string(step)});
  }
  return command;
}

}  // namespace examples
