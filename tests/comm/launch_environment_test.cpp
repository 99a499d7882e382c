// Launch detection as a table: from variables to the process's rank, or to the variables that are
// wrong.
#include "hsdp/comm/rendezvous/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using Map = std::map<std::string, std::string>;

LaunchEnvironment detect(const Map& variables) {
  return detect_launch([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

Map merged(Map first, const Map& second) {
  first.insert(second.begin(), second.end());
  return first;
}

const Map kTorchrunMap{{"RANK", "5"},
                       {"WORLD_SIZE", "8"},
                       {"LOCAL_RANK", "1"},
                       {"LOCAL_WORLD_SIZE", "4"},
                       {"MASTER_ADDR", "node0"},
                       {"MASTER_PORT", "29500"},
                       {"TORCHELASTIC_RUN_ID", "run7"},
                       {"TORCHELASTIC_RESTART_COUNT", "2"}};
const Map kOpenMpiMap{{"OMPI_COMM_WORLD_RANK", "2"},
                      {"OMPI_COMM_WORLD_SIZE", "4"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                      {"PMIX_RANK", "2"},
                      {"PMIX_NAMESPACE", "1234.1"}};
const Map kMpichMap{
    {"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}};
const Map kSlurmMap{{"SLURM_JOB_ID", "77"},
                    {"SLURM_STEP_ID", "0"},
                    {"SLURM_PROCID", "3"},
                    {"SLURM_NTASKS", "6"},
                    {"SLURM_LOCALID", "1"},
                    {"SLURM_NODEID", "1"},
                    {"SLURM_STEP_TASKS_PER_NODE", "2(x3)"}};

struct Expected {
  LaunchFamily family;
  int rank;
  int size;
  std::optional<int> local_rank;
  std::optional<int> local_size;
  bool one_host;
};

struct Row {
  std::string title;
  Map variables;
  Expected expected;
};

void expect_row(const Row& row) {
  SCOPED_TRACE(row.title);
  const LaunchEnvironment launch = detect(row.variables);
  EXPECT_EQ(launch.family, row.expected.family);
  EXPECT_EQ(launch.rank, row.expected.rank);
  EXPECT_EQ(launch.size, row.expected.size);
  EXPECT_EQ(launch.local_rank, row.expected.local_rank);
  EXPECT_EQ(launch.local_size, row.expected.local_size);
  EXPECT_EQ(launch.one_host(), row.expected.one_host);
}

TEST(LaunchEnvironmentTest, EveryFamilyAloneAndInsideAnother) {
  const std::vector<Row> rows{
      {"nothing", {}, {LaunchFamily::kSingle, 0, 1, {}, {}, true}},
      {"torchrun", kTorchrunMap, {LaunchFamily::kTorchrun, 5, 8, 1, 4, false}},
      {"rank and size alone",
       {{"RANK", "1"}, {"WORLD_SIZE", "2"}},
       {LaunchFamily::kTorchrun, 1, 2, {}, {}, true}},
      {"rank and size with an address",
       {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"HSDP_ADDR", "10.0.0.1"}, {"HSDP_PORT", "4000"}},
       {LaunchFamily::kTorchrun, 1, 2, {}, {}, false}},
      {"one host in spite of an address",
       {{"RANK", "1"},
        {"WORLD_SIZE", "2"},
        {"LOCAL_RANK", "1"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"HSDP_ADDR", "10.0.0.1"},
        {"HSDP_PORT", "4000"}},
       {LaunchFamily::kTorchrun, 1, 2, 1, 2, true}},
      {"Open MPI", kOpenMpiMap, {LaunchFamily::kOpenMpi, 2, 4, 2, 4, true}},
      {"MPICH", kMpichMap, {LaunchFamily::kPmi, 1, 3, 1, 3, true}},
      {"PMI without local ranks",
       {{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}},
       {LaunchFamily::kPmi, 1, 3, {}, {}, true}},
      {"Slurm step", kSlurmMap, {LaunchFamily::kSlurm, 3, 6, 1, 2, false}},
      {"empty values are not set",
       {{"RANK", ""}, {"WORLD_SIZE", ""}},
       {LaunchFamily::kSingle, 0, 1, {}, {}, true}},
      // The inner launcher takes precedence.
      {"mpirun inside a Slurm step",
       merged(kOpenMpiMap, kSlurmMap),
       {LaunchFamily::kOpenMpi, 2, 4, 2, 4, true}},
      {"MPICH inside a Slurm step",
       merged(kMpichMap, kSlurmMap),
       {LaunchFamily::kPmi, 1, 3, 1, 3, true}},
      {"torchrun inside mpirun",
       merged(kTorchrunMap, kOpenMpiMap),
       {LaunchFamily::kTorchrun, 5, 8, 1, 4, false}},
      {"torchrun inside everything",
       merged(merged(kTorchrunMap, kMpichMap), kSlurmMap),
       {LaunchFamily::kTorchrun, 5, 8, 1, 4, false}},
      // Incomplete variables of a launcher that is not chosen do no harm.
      {"Open MPI beside half a PMI",
       merged(kOpenMpiMap, {{"PMI_RANK", "9"}}),
       {LaunchFamily::kOpenMpi, 2, 4, 2, 4, true}},
  };
  for (const Row& row : rows) expect_row(row);
}

TEST(LaunchEnvironmentTest, AnAllocationIsNoStep) {
  Map allocation = kSlurmMap;
  allocation.erase("SLURM_STEP_ID");
  const Expected single{LaunchFamily::kSingle, 0, 1, {}, {}, true};
  expect_row({"job id alone", {{"SLURM_JOB_ID", "77"}}, single});
  expect_row({"all but the step", allocation, single});
  for (const char* shell : {"batch", "interactive", "4294967291", "4294967290"}) {
    allocation["SLURM_STEP_ID"] = shell;
    expect_row({shell, allocation, single});
  }
}

TEST(LaunchEnvironmentTest, SlurmTasksOfThisNode) {
  Map variables = kSlurmMap;
  variables["SLURM_STEP_TASKS_PER_NODE"] = "3,1(x2),1";
  for (const auto& [node, tasks] : std::map<std::string, int>{{"0", 3}, {"1", 1}, {"3", 1}}) {
    variables["SLURM_NODEID"] = node;
    variables["SLURM_LOCALID"] = "0";
    EXPECT_EQ(detect(variables).local_size, tasks) << node;
  }
  variables["SLURM_NODEID"] = "9";
  EXPECT_EQ(detect(variables).local_size, std::nullopt);
}

struct BadRow {
  std::string title;
  Map variables;
  std::vector<std::string> named;
};

TEST(LaunchEnvironmentTest, PartialAndContradictorySetsNameTheVariables) {
  const std::vector<BadRow> rows{
      {"no size", {{"RANK", "1"}}, {"RANK", "WORLD_SIZE"}},
      {"no rank", {{"WORLD_SIZE", "2"}}, {"RANK", "WORLD_SIZE"}},
      {"no Open MPI size",
       {{"OMPI_COMM_WORLD_RANK", "1"}},
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}},
      {"no PMI size", {{"PMI_RANK", "1"}}, {"PMI_RANK", "PMI_SIZE"}},
      {"bare Slurm step", {{"SLURM_STEP_ID", "0"}}, {"SLURM_PROCID", "SLURM_NTASKS"}},
      {"partial set of the chosen family",
       merged(kOpenMpiMap, {{"RANK", "1"}}),
       {"RANK", "WORLD_SIZE"}},
      {"rank too large", {{"RANK", "2"}, {"WORLD_SIZE", "2"}}, {"RANK=2", "WORLD_SIZE=2"}},
      {"empty world", {{"RANK", "0"}, {"WORLD_SIZE", "0"}}, {"RANK=0", "WORLD_SIZE=0"}},
      {"local rank too large",
       {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}},
       {"LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"}},
      {"local size too large",
       {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "4"}},
       {"LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"}},
      {"no number", {{"RANK", "one"}, {"WORLD_SIZE", "2"}}, {"RANK", "'one'"}},
      {"negative", {{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, {"RANK", "'-1'"}},
      {"trailing text", {{"RANK", "1x"}, {"WORLD_SIZE", "2"}}, {"RANK", "'1x'"}},
      {"overflow", {{"RANK", "99999999999"}, {"WORLD_SIZE", "2"}}, {"RANK"}},
      {"address without port", {{"HSDP_ADDR", "h"}}, {"HSDP_ADDR", "HSDP_PORT"}},
      {"port without address", {{"HSDP_PORT", "1"}}, {"HSDP_ADDR", "HSDP_PORT"}},
      {"port out of range", {{"HSDP_ADDR", "h"}, {"HSDP_PORT", "65536"}}, {"HSDP_PORT", "65536"}},
      {"two secrets",
       {{"HSDP_SECRET", "a"}, {"HSDP_SECRET_FILE", "/dev/null"}},
       {"HSDP_SECRET", "HSDP_SECRET_FILE"}},
      {"no such secret",
       {{"HSDP_SECRET_FILE", "/nowhere/secret"}},
       {"HSDP_SECRET_FILE", "/nowhere/secret"}},
      {"unreadable secret", {{"HSDP_SECRET_FILE", "/proc"}}, {"HSDP_SECRET_FILE", "'/proc'"}},
      {"empty secret", {{"HSDP_SECRET_FILE", "/dev/null"}}, {"HSDP_SECRET_FILE"}},
  };
  for (const BadRow& row : rows) {
    SCOPED_TRACE(row.title);
    for (const std::string& name : row.named) {
      EXPECT_THAT([&] { static_cast<void>(detect(row.variables)); },
                  ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr(name)));
    }
  }
}

TEST(LaunchEnvironmentTest, TheJobIsNamedByWhatAllItsRanksShare) {
  EXPECT_EQ(detect(kTorchrunMap).job, "run7@node0:29500");
  EXPECT_EQ(detect(merged({{"HSDP_JOB", "mine"}}, kTorchrunMap)).job, "mine");
  EXPECT_EQ(detect(kOpenMpiMap).job, "1234.1");
  EXPECT_EQ(detect(kSlurmMap).job, "Slurm step 77.0");
  EXPECT_EQ(detect(merged({{"HSDP_JOB", "mine"}}, kSlurmMap)).job, "mine, Slurm step 0");
  EXPECT_EQ(detect(kTorchrunMap).restart_count, 2);
  EXPECT_EQ(detect(kTorchrunMap).master_address, "node0");
  EXPECT_EQ(detect(kTorchrunMap).master_port, 29500);
}

TEST(LaunchEnvironmentTest, WhatIsSurelyOnSeveralHosts) {
  EXPECT_TRUE(detect(kSlurmMap).surely_several_hosts());
  Map one_node = kSlurmMap;
  one_node["SLURM_STEP_TASKS_PER_NODE"] = "6";
  one_node["SLURM_NODEID"] = "0";
  EXPECT_FALSE(detect(one_node).surely_several_hosts());
  EXPECT_FALSE(detect(kTorchrunMap).surely_several_hosts());
}

TEST(LaunchEnvironmentTest, WhoSaysTheSizeIsNamed) {
  EXPECT_EQ(size_source(detect(kSlurmMap)), "6 by SLURM_NTASKS of Slurm");
  EXPECT_EQ(size_source(detect(merged(kTorchrunMap, kSlurmMap))),
            "8 by WORLD_SIZE of hsdp_run or torchrun");
  EXPECT_EQ(size_source(detect({})), "1, without a launcher's variables");
}

TEST(LaunchEnvironmentTest, WithoutANameTheParentNamesTheJob) {
  for (const char* name : {"HSDP_JOB", "MASTER_ADDR", "RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                           "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID"}) {
    ::unsetenv(name);
  }
  const LaunchEnvironment launch = detect_launch();
  EXPECT_THAT(launch.job,
              ::testing::MatchesRegex("parent-" + std::to_string(::getppid()) + "-[1-9][0-9]*"));
  EXPECT_EQ(detect_launch().job, launch.job);
}

TEST(LaunchEnvironmentTest, ASecretFileIsReadWithoutItsNewline) {
  std::string path = "/tmp/hsdp-test-secret-XXXXXX";
  ::close(::mkstemp(path.data()));
  std::ofstream(path) << "top secret\n";
  EXPECT_EQ(detect({{"HSDP_SECRET_FILE", path}}).secret, "top secret");
  EXPECT_EQ(detect({{"HSDP_SECRET", "other"}}).secret, "other");
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace hsdp::comm
