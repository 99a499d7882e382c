// The programs that the demo runs, and where it stores their output.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "examples/demo/job.h"

namespace examples {

struct DemoOptions {
  std::filesystem::path build;  // where the programs were built
  std::filesystem::path data;
  std::filesystem::path out;
  std::size_t step_count = 150;
  double kill_limit_s = 2;  // time for the others to name a killed rank

  [[nodiscard]] std::string program(const std::string& name) const;
  [[nodiscard]] std::string tool(const std::string& name) const;
  // The first, the middle and the last one.
  [[nodiscard]] std::vector<std::size_t> snapshot_steps() const;
};

// One training on the mesh.
struct MeshRun {
  std::string name;  // of its files in `out`
  std::string transport = "auto";
  std::string bucket_bytes = "16384";
  std::vector<std::size_t> snapshot_steps = {};
  std::string program = "train_digits";
};

[[nodiscard]] std::filesystem::path result_path(const DemoOptions& options,
                                                const std::string& name);
[[nodiscard]] JobCommand mesh_command(const DemoOptions& options, const MeshRun& run);
[[nodiscard]] JobCommand alone_command(const DemoOptions& options);

}  // namespace examples
