#include "tests/support/failed_set_up.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <utility>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

void look_around(Reducer& reducer) {
  EXPECT_EQ(reducer.stats().resident_bytes, 0);
  EXPECT_EQ(reducer.stats().begun_step_count, 0);
  EXPECT_GT(reducer.slice("w0").count, 0);
  EXPECT_FALSE(reducer.found_inf());
  Values whole(100);
  const std::vector<NamedArray> arrays{{"w0", {whole.data(), std::ssize(whole), Dtype::kF32}}};
  EXPECT_THROW(reducer.gather_parameters(arrays), UsageError);
  EXPECT_THROW(static_cast<void>(reducer.shard("w0")), UsageError);
}

}  // namespace

const std::vector<SetUpFault>& set_up_faults() {
  static const auto* const kFaults = new std::vector<SetUpFault>{
      {"allocate its carry", FailingCall::kMadvise, 0},
      {"allocate its carry", FailingCall::kMemfdCreate, 0},
      {"prepare its replica hop", FailingCall::kMadvise, 1},
      {"allocate its staging buckets", FailingCall::kMemfdCreate, 1},
      {"allocate its staging buckets", FailingCall::kMemfdCreate, 2},
      {"start its lanes", FailingCall::kPthreadCreate, 0},
      {"start its lanes", FailingCall::kPthreadCreate, 1},
  };
  return *kFaults;
}

void expect_failed_set_up(Reducer& reducer, const Mesh& mesh, const SetUpFault& fault, int bad) {
  SCOPED_TRACE(fault.part + ", call " + std::to_string(fault.skipped));
  const auto begin = [&] { reducer.begin_microbatch(); };
  static_cast<void>(Communicator(mesh.world()).exchange("", "test"));  // all ranks begin together
  const auto start = std::chrono::steady_clock::now();
  if (mesh.rank() == bad) {
    fail_call(fault.call, fault.skipped);
    // The rank's own error, not the one that the other ranks get.
    EXPECT_THAT(caught<Error>(begin), says(Not(HasSubstr("try again"))));
    EXPECT_TRUE(call_has_failed());
  } else {
    EXPECT_THAT(caught<StepAbortedError>(begin),
                names({bad}, AllOf(HasSubstr("rank " + std::to_string(bad) + " of"),
                                   HasSubstr(fault.part), HasSubstr("try again"))));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, within_two_seconds());
  look_around(reducer);
}

}  // namespace hsdp::test
