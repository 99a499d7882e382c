#include "hsdp/comm/rendezvous/launch_environment.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/rendezvous/read_file.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

// The variables of one launcher; an empty name means that it lacks the variable.
struct FamilyVariables {
  LaunchFamily family;
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  std::array<const char*, 2> run_id;
  const char* restart_count;
};

constexpr std::array<FamilyVariables, 4> kFamilies{{
    {LaunchFamily::kTorchrun,
     "torchrun",
     "RANK",
     "WORLD_SIZE",
     "LOCAL_RANK",
     "LOCAL_WORLD_SIZE",
     {"TORCHELASTIC_RUN_ID", ""},
     "TORCHELASTIC_RESTART_COUNT"},
    {LaunchFamily::kOpenMpi,
     "Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"PMIX_NAMESPACE", ""},
     ""},
    {LaunchFamily::kPmi,
     "PMI",
     "PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS",
     {"PMI_JOBID", ""},
     ""},
    {LaunchFamily::kSlurm,
     "Slurm",
     "SLURM_PROCID",
     "SLURM_NTASKS",
     "SLURM_LOCALID",
     "",
     {"SLURM_JOB_ID", "SLURM_STEP_ID"},
     "SLURM_RESTART_COUNT"},
}};

class Variables {
 public:
  explicit Variables(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  // An empty value counts as not set.
  [[nodiscard]] std::optional<std::string> text(const std::string& name) const {
    if (name.empty()) return std::nullopt;
    auto value = lookup_(name);
    return value && !value->empty() ? value : std::nullopt;
  }

  [[nodiscard]] std::optional<int> number(const std::string& name) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int result = 0;
    const char* end = value->data() + value->size();
    const auto [stop, error] = std::from_chars(value->data(), end, result);
    if (error != std::errc{} || stop != end || result < 0) {
      throw UsageError({.where = "launch: " + name,
                        .expected = "an integer of at least 0",
                        .got = "'" + *value + "'"});
    }
    return result;
  }

 private:
  const EnvironmentLookup& lookup_;
};

// Slurm also gives batch and interactive shells a step id, but they are not parallel steps.
bool is_parallel_step(const std::optional<std::string>& step) {
  return step && *step != "batch" && *step != "interactive" && *step != "4294967291" &&
         *step != "4294967290";
}

bool is_set(const FamilyVariables& names, const Variables& variables) {
  if (names.family == LaunchFamily::kSlurm) {
    return is_parallel_step(variables.text("SLURM_STEP_ID"));
  }
  return variables.text(names.rank) || variables.text(names.size);
}

// SLURM_STEP_TASKS_PER_NODE reads "4(x2),3": runs of equal counts.
std::optional<int> slurm_local_size(const Variables& variables) {
  const auto counts = variables.text("SLURM_STEP_TASKS_PER_NODE");
  const auto node = variables.number("SLURM_NODEID");
  if (!counts || !node) return std::nullopt;
  int first_node = 0;
  std::istringstream runs(*counts);
  for (std::string run; std::getline(runs, run, ',');) {
    int tasks = 0;
    int nodes = 1;
    const char* end = run.data() + run.size();
    const auto parsed = std::from_chars(run.data(), end, tasks);
    const std::string_view rest(parsed.ptr, end);
    if (rest.starts_with("(x")) std::from_chars(parsed.ptr + 2, end, nodes);
    first_node += nodes;
    if (*node < first_node) return tasks;
  }
  return std::nullopt;
}

void require(bool holds, const FamilyVariables& names, const std::string& problem) {
  if (holds) return;
  throw UsageError("launch: contradictory variables of " + std::string(names.launcher) + ": " +
                   problem + "; set them as the launcher does, or none of them");
}

std::string shown(const char* name, int value) {
  return std::string(name) + "=" + std::to_string(value);
}

void read_family(const FamilyVariables& names, const Variables& variables,
                 LaunchEnvironment& launch) {
  const auto rank = variables.number(names.rank);
  const auto size = variables.number(names.size);
  if (!rank || !size) {
    const std::string found = rank ? names.rank : size ? names.size : "SLURM_STEP_ID";
    const std::string missing = !rank && !size ? std::string(names.rank) + " and " + names.size
                                : rank         ? names.size
                                               : names.rank;
    throw UsageError("launch: partial variables of " + std::string(names.launcher) + ": " + found +
                     " is set, but not " + missing + "; set all or none of them");
  }
  launch.family = names.family;
  launch.rank = *rank;
  launch.size = *size;
  launch.local_rank = variables.number(names.local_rank);
  launch.local_size = names.family == LaunchFamily::kSlurm ? slurm_local_size(variables)
                                                           : variables.number(names.local_size);
  const std::string local_size_name = names.family == LaunchFamily::kSlurm
                                          ? "SLURM_STEP_TASKS_PER_NODE"
                                          : std::string(names.local_size);
  require(*rank < *size, names, shown(names.rank, *rank) + " but " + shown(names.size, *size));
  if (launch.local_size) {
    require(
        *launch.local_size >= 1 && *launch.local_size <= *size, names,
        shown(local_size_name.c_str(), *launch.local_size) + " but " + shown(names.size, *size));
  }
  if (launch.local_rank) {
    const int limit = launch.local_size.value_or(*size);
    require(*launch.local_rank < limit, names,
            shown(names.local_rank, *launch.local_rank) + " but " +
                shown(launch.local_size ? local_size_name.c_str() : names.size, limit));
  }
  launch.restart_count = variables.number(names.restart_count).value_or(0);
}

std::string job_name(const FamilyVariables* names, const Variables& variables,
                     const LaunchEnvironment& launch) {
  const bool is_step = names != nullptr && names->family == LaunchFamily::kSlurm;
  if (const auto job = variables.text("HSDP_JOB")) {
    // Without the job's id, in which parts of a heterogeneous job differ.
    return is_step ? *job + ", " + kSlurmStepMark + variables.text("SLURM_STEP_ID").value_or("")
                   : *job;
  }
  std::string run;
  if (names != nullptr) {
    for (const char* name : names->run_id) {
      if (const auto part = variables.text(name)) run += (run.empty() ? "" : ".") + *part;
    }
  }
  if (is_step) run = kSlurmStepMark + run;
  if (launch.master_address) {
    run += "@" + *launch.master_address + ":" + std::to_string(launch.master_port.value_or(0));
  }
  return run;
}

std::optional<std::string> read_secret(const Variables& variables) {
  auto secret = variables.text("HSDP_SECRET");
  const auto path = variables.text("HSDP_SECRET_FILE");
  if (!path) return secret;
  if (secret) {
    throw UsageError("launch: HSDP_SECRET and HSDP_SECRET_FILE are both set; set one of them");
  }
  auto contents = read_file(*path);
  if (!contents) {
    throw_if_descriptor_limit("launch: HSDP_SECRET_FILE: cannot read '" + *path + "'");
    throw UsageError({.where = "launch: HSDP_SECRET_FILE",
                      .expected = "the path of a file that this rank can read",
                      .got = "'" + *path + "'"});
  }
  while (!contents->empty() && (contents->back() == '\n' || contents->back() == '\r')) {
    contents->pop_back();
  }
  if (contents->empty()) {
    throw UsageError({.where = "launch: HSDP_SECRET_FILE",
                      .expected = "a file with a secret",
                      .got = "'" + *path + "', which is empty"});
  }
  return contents;
}

std::optional<int> read_port(const Variables& variables, const char* name) {
  const auto port = variables.number(name);
  if (port && (*port < 1 || *port > 65535)) {
    throw UsageError({.where = "launch: " + std::string(name),
                      .expected = "a port from 1 to 65535",
                      .got = std::to_string(*port)});
  }
  return port;
}

void read_addresses(const Variables& variables, LaunchEnvironment& launch) {
  launch.address = variables.text("HSDP_ADDR");
  launch.port = read_port(variables, "HSDP_PORT");
  if (launch.address.has_value() != launch.port.has_value()) {
    throw UsageError(std::string("launch: partial variables: ") +
                     (launch.address ? "HSDP_ADDR is set, but HSDP_PORT is not"
                                     : "HSDP_PORT is set, but HSDP_ADDR is not") +
                     "; set both or neither");
  }
  launch.master_address = variables.text("MASTER_ADDR");
  launch.master_port = read_port(variables, "MASTER_PORT");
  launch.secret = read_secret(variables);
}

// Ranks started by one parent share this name; the start time detects a reused pid.
std::string parent_name() {
  const pid_t parent = ::getppid();
  const auto read = read_file("/proc/" + std::to_string(parent) + "/stat");
  if (!read) throw_if_descriptor_limit("launch: cannot read about the parent process");
  const std::string stat = read.value_or("");
  std::string start_time = "0";
  // Field 2, the command, is in parentheses and may contain anything; the start time is field 22.
  if (const auto command_end = stat.rfind(')'); command_end != std::string::npos) {
    std::istringstream fields(stat.substr(command_end + 1));
    for (int field = 3; field <= 22; ++field) fields >> start_time;
  }
  return "parent-" + std::to_string(parent) + "-" + start_time;
}

}  // namespace

bool LaunchEnvironment::one_host() const {
  if (local_size) return *local_size == size;
  return size == 1 || !address.has_value();
}

bool LaunchEnvironment::surely_several_hosts() const {
  return family == LaunchFamily::kSlurm && local_size && *local_size < size;
}

int LaunchEnvironment::common_restart_count() const {
  return family == LaunchFamily::kTorchrun ? 0 : restart_count;
}

std::string size_source(const LaunchEnvironment& launch) {
  for (const FamilyVariables& names : kFamilies) {
    if (names.family == launch.family) {
      const bool is_torchrun = names.family == LaunchFamily::kTorchrun;
      return std::to_string(launch.size) + " by " + names.size + " of " +
             (is_torchrun ? "hsdp_run or torchrun" : names.launcher);
    }
  }
  return std::to_string(launch.size) + ", without a launcher's variables";
}

LaunchEnvironment detect_launch(const EnvironmentLookup& lookup) {
  const Variables variables(lookup);
  LaunchEnvironment launch;
  read_addresses(variables, launch);
  const FamilyVariables* chosen = nullptr;
  for (const FamilyVariables& names : kFamilies) {
    if (chosen == nullptr && is_set(names, variables)) chosen = &names;
  }
  if (chosen != nullptr) read_family(*chosen, variables, launch);
  launch.job = job_name(chosen, variables, launch);
  return launch;
}

std::optional<std::string> process_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

LaunchEnvironment detect_launch() {
  LaunchEnvironment launch = detect_launch(process_variable);
  if (launch.job.empty()) launch.job = parent_name();
  return launch;
}

}  // namespace hsdp::comm
