// This process's place in the job, read from the launcher's variables [Note: launch detection].
//
// Explicit values win; then the first family that is set: hsdp_run/torchrun, Open MPI, PMI (MPICH),
// Slurm step; otherwise there is one process. An incomplete or contradictory set in the chosen
// family is a UsageError that names the variables. Pure: reads only `lookup`, so tests pass a map.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace hsdp::comm {

enum class LaunchFamily { kExplicit, kTorchrun, kOpenMpi, kPmi, kSlurm, kSingle };

struct LaunchEnvironment {
  LaunchFamily family = LaunchFamily::kSingle;
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
  std::optional<int> local_size;
  // HSDP_JOB; or run id + master address; or parent pid + start time. In Slurm it always includes
  // the step, so that two steps are never taken for one job.
  std::string job;
  int restart_count = 0;                      // TORCHELASTIC_RESTART_COUNT or similar
  std::optional<std::string> address;         // HSDP_ADDR
  std::optional<int> port;                    // HSDP_PORT
  std::optional<std::string> secret;          // HSDP_SECRET, or the contents of HSDP_SECRET_FILE
  std::optional<std::string> master_address;  // MASTER_ADDR
  std::optional<int> master_port;             // MASTER_PORT; we never bind it
  // Whether there is one host: local size equals world size or, if unknown, HSDP_ADDR is not set.
  [[nodiscard]] bool one_host() const;
  // Slurm's nodes are separate hosts. Several torchrun agents may share one host.
  [[nodiscard]] bool surely_several_hosts() const;
  // A restart count that all hosts agree on: a torchrun agent counts only failures on its own host.
  [[nodiscard]] int common_restart_count() const;
};

// Marks the name of a job that is a Slurm step.
constexpr const char* kSlurmStepMark = "Slurm step ";

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string&)>;
[[nodiscard]] std::optional<std::string> process_variable(const std::string& name);

// The source of the number of ranks, for messages.
[[nodiscard]] std::string size_source(const LaunchEnvironment& launch);

[[nodiscard]] LaunchEnvironment detect_launch(const EnvironmentLookup& lookup);
[[nodiscard]] LaunchEnvironment detect_launch();  // reads the environment

}  // namespace hsdp::comm
