// What ranks tell each other at the end of a microbatch, as bytes.
#include "hsdp/reducer/status_word.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <span>
#include <string>
#include <vector>

namespace hsdp::reducer {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

void expect_same(const StatusWord& got, const StatusWord& want) {
  EXPECT_EQ(got.call, want.call);
  EXPECT_EQ(got.step, want.step);
  EXPECT_EQ(got.microbatch, want.microbatch);
  ASSERT_EQ(got.groups.size(), want.groups.size());
  for (std::size_t g = 0; g < got.groups.size(); ++g) {
    EXPECT_EQ(got.groups[g].sync, want.groups[g].sync);
    EXPECT_EQ(got.groups[g].local_count, want.groups[g].local_count);
    EXPECT_EQ(got.groups[g].carry_count, want.groups[g].carry_count);
    EXPECT_EQ(got.groups[g].has_carry, want.groups[g].has_carry);
    EXPECT_EQ(got.groups[g].has_total, want.groups[g].has_total);
  }
  EXPECT_EQ(got.sums, want.sums);
  EXPECT_EQ(got.divide_factor, want.divide_factor);
  EXPECT_EQ(got.loss_scale, want.loss_scale);
  EXPECT_EQ(got.dropped, want.dropped);
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
                            .groups = {{Sync::kNone, 3, 4, true, false},
                                       {Sync::kAll, 0, 2, false, true},
                                       {Sync::kShard, 1, 1, false, false}},
                            .sums = "several, in f32",
                            .divide_factor = number,
                            .loss_scale = -number,
                            .dropped = !reason.empty(),
                            .reason = reason};
      expect_same(StatusWord::decode(word.encode()), word);
    }
  }
  expect_same(StatusWord::decode(StatusWord().encode()), StatusWord());
}

// What the words of the job's ranks 4, 5, 6 disagree on, and who is named; nothing when they agree.
std::string mismatch_of(std::span<const StatusWord> words, const WordNames& names = {}) {
  const std::vector<int> ranks{4, 5, 6};
  const auto found = find_mismatch(words, std::span(ranks).first(words.size()), names);
  if (!found) return "";
  return testing::PrintToString(found->failure.ranks) + " " + found->failure.message;
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

// Counts are this rank's own; the sync is everybody's.
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
  EXPECT_EQ(find_drop(words), 2);
  EXPECT_EQ(find_sender(words), &words[0]);
  words[1].call = "discard";
  EXPECT_NE(mismatch_of(words), "") << "of those that did not drop it";
  words[1] = words[0];
  words[1].dropped = true;  // as it was sending, with the others
  EXPECT_EQ(mismatch_of(words), "");
  words[0].call = "discard";
  EXPECT_NE(mismatch_of(words), "") << "of those that are in step";
  EXPECT_EQ(find_sender(std::span(words).subspan(2)), nullptr);
  EXPECT_EQ(find_drop(std::span(words).first(1)), std::nullopt);
}

TEST(StatusWord, ThePartiesOfThoseWhoGoOnMustSayTheSame) {
  std::vector<StatusWord> words(3, {.call = "finish", .sections = {"", std::string("\0 \n", 3)}});
  const WordNames names{.parties = {"replica hop loco", "optimizer adam"}};
  EXPECT_EQ(StatusWord::decode(words[0].encode()).sections, words[0].sections);
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

TEST(StatusWord, ThePartyThatDiffersShowsItsFirstLineThatDoes) {
  std::vector<StatusWord> words(3, {.call = "finish", .sections = {"one", "#1"}});
  words[2].sections[1] = "#2";
  const WordNames names{.parties = {"first", "second"}};
  const std::vector<int> ranks{0, 1, 2};
  ASSERT_EQ(find_mismatch(words, ranks, names)->party, 1U);
  const std::vector<StatusWord> said = words;
  const std::string same = "lr 1\nbeta 2";
  show_details(words, 1, std::vector<std::string>{same, same, same});
  EXPECT_EQ(words[2].sections, said[2].sections);
  show_details(words, 1, std::vector<std::string>{same, same, "lr 1\nbeta 3\nmore"});
  EXPECT_THAT(mismatch_of(words, names),
              HasSubstr("expected second 'beta 2' on every rank, got 'beta 3' on rank 2 of 3"));
  words = said;
  show_details(words, 1, std::vector<std::string>{same, same, same + "\nmore"});
  EXPECT_THAT(mismatch_of(words, names), HasSubstr("second '' on every rank, got 'more'"));
  words = said;  // whose party is gone is left out, and so is who dropped the step and says nothing
  words[0] = {.call = "finish", .dropped = true};
  EXPECT_THAT(mismatch_of(words, names), HasSubstr("(# is a digest of more"));
  show_details(words, 1, std::vector<std::string>{"", "lr 1", ""});
  EXPECT_EQ(words[2].sections, said[2].sections);
  show_details(words, 1, std::vector<std::string>{"", "lr 1", "lr 2"});
  EXPECT_THAT(mismatch_of(words, names),
              AllOf(HasSubstr("second 'lr 1' on every rank, got 'lr 2' on rank 2 of 3"),
                    Not(HasSubstr("digest"))));
}

// Bytes differ, also where they are written alike in a message; a party that is gone here may be
// there on other ranks.
TEST(StatusWord, PartiesAreComparedByTheirBytesWhereTheyArePresent) {
  std::vector<StatusWord> words(3, {.call = "finish", .sections = {std::string("\x01"), "same"}});
  words[1].sections[1] = std::nullopt;
  for (StatusWord& word : words) {
    const Sections sections = word.sections;
    word = StatusWord::decode(word.encode());
    EXPECT_EQ(word.sections, sections);
  }
  EXPECT_EQ(mismatch_of(words), "");
  words[2].sections[1] = "";
  EXPECT_THAT(mismatch_of(words), HasSubstr("'same' on every rank, got '' on rank 2"));
  words[2].sections = {"0x01", "same"};
  EXPECT_THAT(mismatch_of(words), StartsWith("{ 6 }"));
}

TEST(StatusWord, ALongReasonIsCutBetweenCharacters) {
  for (const std::string& text :
       {std::string(1 << 20, 'x'), std::string(kMaxReasonBytes - 1, 'x') + "\u00e9 and more"}) {
    const StatusWord word{.dropped = true, .reason = text};
    const std::string cut = StatusWord::decode(word.encode()).reason;
    EXPECT_EQ(cut, text.substr(0, cut.size()));
    EXPECT_LE(cut.size(), kMaxReasonBytes);
    EXPECT_GE(cut.size(), kMaxReasonBytes - 1);
    EXPECT_EQ(cut.back(), 'x');
  }
}

}  // namespace
}  // namespace hsdp::reducer
