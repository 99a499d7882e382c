#include "examples/demo/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>

namespace examples {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::ThrowsMessage;

JobCommand shell(const std::string& script) {
  return {.arguments = {"/bin/sh", "-c", script}, .environment = {{"HSDP_WORD", "hello"}}};
}

TEST(Job, LinesThenTheEnd) {
  Job job(shell("echo one; echo $HSDP_WORD >&2; printf three; exit 4"), 20s);
  EXPECT_EQ(job.next_line(), "one");
  EXPECT_EQ(job.next_line(), "hello");
  EXPECT_EQ(job.next_line(), "three");
  EXPECT_EQ(job.next_line(), std::nullopt);
  const JobOutcome outcome = job.wait();
  EXPECT_EQ(outcome.status, 4);
  EXPECT_EQ(outcome.output, "one\nhello\nthree");
}

TEST(Job, ASignalIsAStatusToo) { EXPECT_EQ(Job(shell("kill -9 $$"), 20s).wait().status, 137); }

TEST(Job, AnotherStatusThanExpectedThrowsWithTheOutput) {
  EXPECT_EQ(run_job(shell("exit 3"), 3).status, 3);
  EXPECT_THAT([] { run_job(shell("echo because; exit 3")); },
              ThrowsMessage<std::runtime_error>(
                  testing::AllOf(HasSubstr("status 3"), HasSubstr("because"))));
  EXPECT_THAT([] { run_job({.arguments = {"/nowhere/program"}, .environment = {}}); },
              ThrowsMessage<std::runtime_error>(HasSubstr("cannot run /nowhere/program")));
}

TEST(Job, NoWaitIsUnbounded) {
  Job job(shell("echo started; exec sleep 100"), 1s);
  EXPECT_THAT([&] { job.wait(); },
              ThrowsMessage<std::runtime_error>(HasSubstr("did not end in time")));
}

}  // namespace
}  // namespace examples
