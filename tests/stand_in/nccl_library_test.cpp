// Which libnccl is opened, and what the error says if there is none, or if it is too old or
// something else.
#include "hsdp/comm/nccl/nccl_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "hsdp/error.h"
#include "nccl_ranks.h"

namespace hsdp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class NcclLibraryTest : public ::testing::Test {
 protected:
  NcclLibraryTest() { static_cast<void>(test::nccl_stand_in()); }
  ~NcclLibraryTest() override {
    ::setenv("HSDP_NCCL_LIBRARY", HSDP_NCCL_STAND_IN, 1);
    ::unsetenv("HSDP_TEST_NCCL_VERSION");
    test::nccl_stand_in().reset();
  }
  static void open_bare(const char* version) {
    ::setenv("HSDP_NCCL_LIBRARY", HSDP_NCCL_BARE, 1);
    ::setenv("HSDP_TEST_NCCL_VERSION", version, 1);
    static_cast<void>(NcclLibrary::open());
  }
};

TEST_F(NcclLibraryTest, IsTheOneThatTheVariableNames) {
  const auto library = NcclLibrary::open();
  EXPECT_EQ(library->path(), HSDP_NCCL_STAND_IN);
  EXPECT_EQ(library->version(), "2.28.9");
  EXPECT_TRUE(library->can_register());
  EXPECT_TRUE(library->can_revoke());
}

// Any other user of NCCL in the process would read it.
TEST_F(NcclLibraryTest, LeavesTheEnvironmentAlone) {
  static_cast<void>(NcclLibrary::open());
  EXPECT_EQ(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT"), nullptr);
}

TEST_F(NcclLibraryTest, ThatIsNotThereIsNamed) {
  ::setenv("HSDP_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  EXPECT_THAT([] { static_cast<void>(NcclLibrary::open()); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("HSDP_NCCL_LIBRARY"), HasSubstr("/nowhere/libnccl.so.2"))));
}

TEST_F(NcclLibraryTest, NoneAtAllSaysWhatToInstall) {
  ::unsetenv("HSDP_NCCL_LIBRARY");
  try {
    EXPECT_NE(NcclLibrary::open()->path(), "");  // this machine has one
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("expected libnccl.so.2 2.18 or newer, got none"),
                                    HasSubstr("pip install nvidia-nccl-cu13")));
  }
}

TEST_F(NcclLibraryTest, TooOldIsNamedWithItsVersion) {
  EXPECT_THAT([] { open_bare("21605"); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("expected version 2.18 or newer"),
                                              HasSubstr("got 2.16.5 in"), HasSubstr("nccl_bare"))));
  EXPECT_THAT([] { open_bare("2708"); }, ThrowsMessage<UsageError>(HasSubstr("got 2.7.8")));
  EXPECT_THAT([] { open_bare("0"); }, ThrowsMessage<UsageError>(HasSubstr("got none")));
}

TEST_F(NcclLibraryTest, MissingCallsAreNamed) {
  EXPECT_THAT(
      [] { open_bare("22809"); },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("expected a library with ncclGetErrorString"),
                                      HasSubstr("got 2.28.9 in"))));
}

}  // namespace
}  // namespace hsdp::comm
