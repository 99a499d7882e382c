// Checks the ranges that a profiler receives from the source that CUDA builds use.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>

#include "hsdp/comm/operation_record.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::ElementsAre;

// NVTX loads the tool at the program's first range, so the variable must be set before main().
const bool has_tool = ::setenv("NVTX_INJECTION64_PATH", HSDP_NVTX_TOOL, 1) == 0;

// What the tool was told since the last call, without thread numbers.
std::vector<std::string> told_texts() {
  static std::size_t seen = 0;
  void* const tool = ::dlopen(HSDP_NVTX_TOOL, RTLD_NOW | RTLD_NOLOAD);
  if (tool == nullptr) return {"no tool"};
  const auto told = reinterpret_cast<char* (*)()>(::dlsym(tool, "nvtx_tool_told"));
  char* const text = told();
  std::istringstream lines(std::string(text).substr(seen));
  seen = std::string(text).size();
  std::free(text);
  std::vector<std::string> texts;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string what;
    std::string thread;
    std::string rest;
    words >> what >> thread;
    std::getline(words, rest);
    texts.push_back(what + rest);
  }
  return texts;
}

TEST(NvtxRanges, AreThoseOfOperations) {
  ASSERT_TRUE(has_tool);
  const Operations none;
  std::optional<Operation> kept;
  {
    Operation hop(none, {.kind = OperationKind::kShardHop, .step = 3, .index = 12});
    { const Operation word(none, {.kind = OperationKind::kWord, .turn = 5}); }
    Operation handed_on(none, {.kind = OperationKind::kReplicaHop, .index = 1});
    kept.emplace(std::move(handed_on));
    hop.end(OperationState::kIssued);
  }
  kept.reset();
  EXPECT_THAT(told_texts(), ElementsAre("domain hsdp", "push hsdp:shard_hop 12", "push hsdp:word 5",
                                        "pop", "push hsdp:replica_hop 1", "pop", "pop"));
}

TEST(NvtxRanges, OfAStepEnd) {
  static_cast<void>(told_texts());
  const StepCase step = random_step(odd_parameters(Dtype::kF32), 4, {Sync::kAll}, 3);
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    static_cast<void>(run_step(reducer, step, mesh.rank()));
  });
  const std::vector<std::string> texts = told_texts();
  std::map<std::string, std::ptrdiff_t> counts;
  for (const std::string& text : texts) ++counts[text];
  EXPECT_EQ(counts["push hsdp:shard_hop 0"], 4);
  EXPECT_EQ(counts["push hsdp:replica_hop 0"], 4);
  EXPECT_GT(counts["push hsdp:pack"], 4);
  std::ptrdiff_t pushes = 0;
  for (const auto& [text, count] : counts) pushes += text.starts_with("push") ? count : 0;
  EXPECT_EQ(counts["pop"], pushes);
}

}  // namespace
}  // namespace hsdp
