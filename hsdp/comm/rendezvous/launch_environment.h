// Who this process is, read from the variables that launchers set [Note: launch detection].
//
// Explicit values win, else the first family that is set: hsdp_run/torchrun, Open MPI, PMI (MPICH),
// Slurm step; else one process. A partial or contradictory set inside the chosen family is a
// UsageError that names the variables. Pure: reads `lookup` only, so tests pass a map.
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
  // HSDP_JOB, else run id + master address, else parent pid + start time. Of a Slurm step always
  // with the step, so that two steps never take each other for one job.
  std::string job;
  int restart_count = 0;                      // TORCHELASTIC_RESTART_COUNT and the like
  std::optional<std::string> address;         // HSDP_ADDR
  std::optional<int> port;                    // HSDP_PORT
  std::optional<std::string> secret;          // HSDP_SECRET, or the contents of HSDP_SECRET_FILE
  std::optional<std::string> master_address;  // MASTER_ADDR
  std::optional<int> master_port;             // MASTER_PORT: never bound
  // One host: local size equals world size; when unknown, unless HSDP_ADDR is set.
  [[nodiscard]] bool one_host() const;
  // Slurm's nodes are hosts of their own. Several agents of torchrun may be on one host.
  [[nodiscard]] bool surely_several_hosts() const;
  // The restart as all hosts count it: an agent of torchrun counts only what failed on its own.
  [[nodiscard]] int common_restart_count() const;
};

// Marks the name of a job that is a Slurm step.
constexpr const char* kSlurmStepMark = "Slurm step ";

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string&)>;
[[nodiscard]] std::optional<std::string> process_variable(const std::string& name);

// Who says how many ranks there are, for messages.
[[nodiscard]] std::string size_source(const LaunchEnvironment& launch);

[[nodiscard]] LaunchEnvironment detect_launch(const EnvironmentLookup& lookup);
[[nodiscard]] LaunchEnvironment detect_launch();  // by process_variable

}  // namespace hsdp::comm
