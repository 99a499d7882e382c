// What ranks tell each other at the end of a microbatch, as bytes.
#include "hsdp/reducer/status_word.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace hsdp::reducer {
namespace {

void expect_same(const StatusWord& got, const StatusWord& want) {
  EXPECT_EQ(got.call, want.call);
  EXPECT_EQ(got.step, want.step);
  EXPECT_EQ(got.microbatch, want.microbatch);
  EXPECT_EQ(got.sync, want.sync);
  EXPECT_EQ(got.divide_factor, want.divide_factor);
  EXPECT_EQ(got.loss_scale, want.loss_scale);
  EXPECT_EQ(got.abandoned, want.abandoned);
  EXPECT_EQ(got.reason, want.reason);
}

TEST(StatusWord, ComesBackAsItWas) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  constexpr double kSmallest = std::numeric_limits<double>::denorm_min();
  const std::string reasons[] = {"", "one line", "two\nlines\n", std::string("nul\0byte", 8)};
  for (const std::string& reason : reasons) {
    for (const double number : {1.0 / 3.0, 65536.0, kLargest, kSmallest}) {
      const StatusWord word{.call = "microbatch",
                            .step = std::numeric_limits<std::int64_t>::max(),
                            .microbatch = 3,
                            .sync = "none all shard",
                            .divide_factor = number,
                            .loss_scale = -number,
                            .abandoned = !reason.empty(),
                            .reason = reason};
      expect_same(StatusWord::decode(word.encode()), word);
    }
  }
  expect_same(StatusWord::decode(StatusWord().encode()), StatusWord());
}

TEST(StatusWord, AMismatchNamesTheFieldAndBothValues) {
  std::vector<StatusWord> words(3);
  words[1].divide_factor = 2.5;
  const std::vector<int> ranks{4, 5, 6};
  const auto failure = find_mismatch(words, ranks);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->ranks, std::vector<int>{5});
  EXPECT_NE(
      failure->message.find("expected gradient divide factor 'the default' on every rank, got "
                            "'2.5' on rank 1 of 3"),
      std::string::npos)
      << failure->message;
}

}  // namespace
}  // namespace hsdp::reducer
