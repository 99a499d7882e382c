// What ranks tell each other at the end of a microbatch, in bytes.
#include "hsdp/reducer/status_word.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace hsdp::reducer {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

const std::vector<int> kRanks{4, 5, 6};  // of the job

// The merged words of ranks 4, 5 and 6.
Words join(std::span<const StatusWord> words) {
  Words joined{.own = words.front(), .all = {}};
  for (std::size_t i = words.size(); i-- > 0;) joined.all.add(kRanks[i], words[i].saying());
  joined.all.close();
  return joined;
}

TEST(StatusWord, WhatIsSentComesBackWithTheLargestCounts) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  constexpr double kSmallest = std::numeric_limits<double>::denorm_min();
  for (const double number : {1.0 / 3.0, 65536.0, kLargest, kSmallest}) {
    std::vector<StatusWord> words(
        2, {.call = "microbatch",
            .step = std::numeric_limits<std::int64_t>::max(),
            .microbatch = 3,
            .groups = {{Sync::kNone, 3, 4, true, false}, {Sync::kAll, 0, 2, false, true}},
            .sums = "several, in f32",
            .divide_factor = number,
            .loss_scale = -number,
            .count_by = CountBy::kTokens});
    words[1].groups[1].local_count = 7;
    const StatusWord got = join(words).sent().value();
    EXPECT_EQ(got.call, words[0].call);
    EXPECT_EQ(got.step, words[0].step);
    EXPECT_EQ(got.microbatch, words[0].microbatch);
    EXPECT_EQ(got.sums, words[0].sums);
    EXPECT_EQ(got.divide_factor, number);
    EXPECT_EQ(got.loss_scale, -number);
    EXPECT_EQ(got.count_by, CountBy::kTokens);
    ASSERT_EQ(got.groups.size(), 2U);
    for (std::size_t g = 0; g < 2; ++g) {
      const GroupPlan& most = words[g].groups[g];
      EXPECT_EQ(got.groups[g].sync, most.sync);
      EXPECT_EQ(got.groups[g].local_count, most.local_count);
      EXPECT_EQ(got.groups[g].carry_count, most.carry_count);
      EXPECT_EQ(got.groups[g].has_carry, most.has_carry);
      EXPECT_EQ(got.groups[g].has_total, most.has_total);
    }
  }
  EXPECT_FALSE(join(std::vector<StatusWord>(2)).sent()) << "nobody sends";
}

TEST(StatusWord, CountsAddUpByReplica) {
  std::vector<StatusWord> words(3);
  EXPECT_THAT(join(words).counts(), IsEmpty());
  words[0].count = 10;
  words[1].count = 20;
  words[2].count = 5;
  words[2].replica = 2;
  EXPECT_THAT(join(words).counts(), ElementsAre(30, 0, 5));
}

TEST(StatusWord, TheLowestRankThatDroppedTheStepSaysWhy) {
  std::vector<StatusWord> words(3, {.step = 7});
  EXPECT_FALSE(join(words).drop());
  const std::string reasons[] = {"", "one line", "two\nlines\n", std::string("nul\0byte", 8)};
  for (const std::string& reason : reasons) {
    words[1] = {.call = kDropCall, .step = 6, .microbatch = 2, .dropped = true, .reason = reason};
    words[2] = {.call = "finish", .step = 7, .dropped = true, .reason = "later"};
    const DropWord drop = join(words).drop().value();
    EXPECT_EQ(drop.rank, 5);
    EXPECT_EQ(drop.microbatch, 2);
    EXPECT_EQ(drop.reason, reason);
    EXPECT_EQ(join(words).least_step(), 6);
  }
}

// What the words disagree on and which ranks are named; empty when they agree.
std::string mismatch_of(const comm::Agreement& all, const WordNames& names = {},
                        std::size_t size = kRanks.size()) {
  const auto found = find_mismatch(all, std::span(kRanks).first(size), names);
  if (!found) return "";
  return testing::PrintToString(found->failure.ranks) + " " + found->failure.message;
}

std::string mismatch_of(std::span<const StatusWord> words, const WordNames& names = {}) {
  return mismatch_of(join(words).all, names, words.size());
}

TEST(StatusWord, AMismatchNamesTheFieldAndBothValues) {
  std::vector<StatusWord> words(3);
  words[1].divide_factor = 2.5;
  EXPECT_THAT(mismatch_of(words),
              AllOf(StartsWith("{ 5 }"),
                    HasSubstr("expected gradient divide factor 'the default' on every rank, got "
                              "'2.5' on rank 1 of 3")));
  words[1].divide_factor = words[0].divide_factor;
  words[2].sums = "several, in f32";
  EXPECT_THAT(mismatch_of(words),
              HasSubstr("expected gradients per parameter 'one' on every rank, got "
                        "'several, in f32' on rank 2 of 3"));
}

// The counts are this rank's own; the sync must be the same on all ranks.
TEST(StatusWord, AnotherSyncIsAMismatchAnotherCountIsNot) {
  std::vector<StatusWord> words(2, {.groups = {{.sync = Sync::kAll}, {.sync = Sync::kNone}}});
  words[1].groups[0].local_count = 7;
  EXPECT_EQ(mismatch_of(words), "");
  words[1].groups[1].sync = Sync::kShard;
  EXPECT_THAT(mismatch_of(words),
              AllOf(HasSubstr("sync 'all none' on every rank, got 'all shard' on rank 1 of 2; "
                              "give the same last="),
                    HasSubstr("hsdp.uneven")));
}

TEST(StatusWord, OfADroppedStepIsNotCompared) {
  std::vector<StatusWord> words(3, {.call = "finish", .step = 4, .groups = {{.sync = Sync::kAll}}});
  words[2] = {.call = kDropCall, .step = 4, .microbatch = 1, .dropped = true, .reason = "why"};
  EXPECT_EQ(mismatch_of(words), "");
  EXPECT_EQ(join(words).sent()->call, "finish");
  words[1].call = "discard";
  EXPECT_NE(mismatch_of(words), "") << "of those that did not drop it";
  words[1] = words[0];
  words[1].dropped = true;  // while it was sending, as the others were
  EXPECT_EQ(mismatch_of(words), "");
  words[0].call = "discard";
  EXPECT_NE(mismatch_of(words), "") << "of those that are in step";
  EXPECT_FALSE(join(std::span(words).subspan(2)).sent());
}

// Each field is compared separately: the value of most ranks is the right one for that field.
TEST(StatusWord, OfManyRanksMostAreRightAndTheFirstOthersAreNamed) {
  std::vector<int> ranks(300);
  std::iota(ranks.begin(), ranks.end(), 0);
  comm::Agreement all;
  for (const int rank : ranks) {
    StatusWord word{.call = "finish", .step = 3};
    if (rank % 30 == 1) {
      word.step = 4;
    } else {
      word.loss_scale = rank;
    }
    all.add(rank, word.saying());
  }
  all.close();
  const auto found = find_mismatch(all, ranks);
  ASSERT_TRUE(found);
  EXPECT_THAT(found->failure.ranks, ElementsAre(1, 31, 61, 91, 121, 151, 181, 211));
  EXPECT_THAT(found->failure.message,
              HasSubstr("expected step '3' on every rank, got '4' on rank 1 of 300"));
}

TEST(StatusWord, ThePartiesOfThoseWhoGoOnMustSayTheSame) {
  std::vector<StatusWord> words(3, {.call = "finish", .sections = {"", std::string("\0 \n", 3)}});
  const WordNames names{.parties = {{"replica hop loco"}, {"optimizer adam"}}};
  EXPECT_EQ(mismatch_of(words, names), "");
  words[1].sections[0] = "step 3";
  EXPECT_THAT(mismatch_of(words, names),
              AllOf(StartsWith("{ 5 }"), HasSubstr("expected replica hop loco '' on every rank, "
                                                   "got 'step 3' on rank 1 of 3")));
  words[1].sections.clear();
  EXPECT_THAT(mismatch_of(words, names), HasSubstr("number of optimizers and replica hops '2'"));
  words[1].dropped = true;
  EXPECT_EQ(mismatch_of(words, names), "");
}

// What ranks tell of a party. A rank whose text is empty tells nothing.
comm::Agreement told(std::span<const std::string> details) {
  comm::Agreement all;
  for (std::size_t i = 0; i < details.size(); ++i) {
    if (!details[i].empty()) all.add(kRanks[i], {.equal = {details[i]}});
  }
  all.close();
  return all;
}

TEST(StatusWord, ThePartyThatDiffersShowsItsFirstLineThatDoes) {
  std::vector<StatusWord> words(3, {.call = "finish", .sections = {"one", "#1"}});
  words[2].sections[1] = "#2";
  const WordNames names{.parties = {{"first"}, {"second"}}};
  const comm::Agreement said = join(words).all;
  ASSERT_EQ(find_mismatch(said, kRanks, names)->party, 1U);
  EXPECT_THAT(mismatch_of(said, names), HasSubstr("(# is a digest of more"));
  const auto shown = [&](const std::vector<std::string>& details) {
    comm::Agreement all = said;
    show_details(all, 1, told(details));
    return mismatch_of(all, names);
  };
  const std::string same = "lr 1\nbeta 2";
  EXPECT_EQ(shown({same, same, same}), mismatch_of(said, names));
  EXPECT_THAT(shown({same, same, "lr 1\nbeta 3\nmore"}),
              HasSubstr("expected second 'beta 2' on every rank, got 'beta 3' on rank 2 of 3"));
  EXPECT_THAT(shown({same, same, same + "\nmore"}),
              HasSubstr("second '' on every rank, got 'more'"));
  // A rank whose party is gone is left out, and so is a rank that dropped the step and says
  // nothing.
  EXPECT_EQ(shown({"", "lr 1", ""}), mismatch_of(said, names));
  EXPECT_THAT(shown({"", "lr 1", "lr 2"}),
              AllOf(HasSubstr("second 'lr 1' on every rank, got 'lr 2' on rank 2 of 3"),
                    Not(HasSubstr("digest"))));
}

// The bytes are compared, even where a message would show them alike. A party that is gone on this
// rank may exist on others.
TEST(StatusWord, PartiesAreComparedByTheirBytesWhereTheyArePresent) {
  std::vector<StatusWord> words(3, {.call = "finish", .sections = {std::string("\x01"), "same"}});
  words[1].sections[1] = std::nullopt;
  EXPECT_EQ(mismatch_of(words), "");
  EXPECT_FALSE(join(words).is_gone(1));
  words[2].sections[1] = "";
  EXPECT_THAT(mismatch_of(words), HasSubstr("'same' on every rank, got '' on rank 2"));
  words[2].sections = {"0x01", "same"};
  EXPECT_THAT(mismatch_of(words), StartsWith("{ 6 }"));
}

TEST(StatusWord, APartyIsGoneWhenNobodyHasItAndNobodyDroppedTheStep) {
  std::vector<StatusWord> words(2, {.call = "finish", .sections = {"here", std::nullopt}});
  EXPECT_FALSE(join(words).is_gone(0));
  EXPECT_TRUE(join(words).is_gone(1));
  EXPECT_FALSE(join(words).is_gone(2)) << "it came after these words";
  words[1] = {.call = "finish", .dropped = true};
  EXPECT_FALSE(join(words).is_gone(1)) << "who drops it says nothing of its parties";
}

TEST(StatusWord, ALongReasonIsCutBetweenCharacters) {
  for (const std::string& text :
       {std::string(1 << 20, 'x'), std::string(kMaxReasonBytes - 1, 'x') + "\u00e9 and more"}) {
    const StatusWord word{.dropped = true, .reason = text};
    const std::string cut = join({&word, 1}).drop()->reason;
    EXPECT_EQ(cut, text.substr(0, cut.size()));
    EXPECT_LE(cut.size(), kMaxReasonBytes);
    EXPECT_GE(cut.size(), kMaxReasonBytes - 1);
    EXPECT_EQ(cut.back(), 'x');
  }
}

}  // namespace
}  // namespace hsdp::reducer
