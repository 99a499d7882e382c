// What the ranks of a group say, merged into one answer.
#include "hsdp/comm/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "hsdp/comm/control/wire_text.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

std::size_t encoded_size(const Agreement& all) {
  WireWriter out;
  all.encode(out);
  return out.take().size();
}

TEST(Agreement, OfEqualTextsIsAsLongForAFewRanksAsForThousands) {
  for (const bool keeps_all : {false, true}) {
    for (const int size : {1, 16, 4'096}) {
      Agreement all;
      for (int rank = 0; rank < size; ++rank) {
        all.add(
            rank,
            {.equal = {std::string(100, 'x')}, .any = "\1", .most = {7}, .keeps_all = keeps_all});
      }
      all.close();
      ASSERT_THAT(all.places.at(0).said, SizeIs(1));
      EXPECT_EQ(all.places[0].said[0].count, size);
      EXPECT_LT(encoded_size(all), 120U);
    }
  }
}

TEST(Agreement, NamesTheLowestRanksWhoeverComesFirst) {
  Agreement all;
  for (const int rank : {7, 2, 9, 4, 0}) {
    all.add(rank, {.equal = {rank % 2 == 0 ? "even" : "odd"}, .note = rank > 0 ? "mine" : ""});
  }
  all.close();
  const auto& said = all.places.at(0).said;
  ASSERT_THAT(said, SizeIs(2));
  EXPECT_EQ(said[0].text, "even");
  EXPECT_THAT(said[0].ranks, ElementsAre(0, 2, 4));
  EXPECT_THAT(said[1].ranks, ElementsAre(7, 9));
  EXPECT_EQ(all.note_rank, 2);
}

TEST(Agreement, AddsJoinsAndTakesTheLargest) {
  Agreement all;
  all.add(0, {.equal = {std::nullopt, "b"}, .any = std::string("\1\0", 2), .sum = {1}});
  all.add(1, {.equal = {"a"}, .any = "\4", .sum = {2, -5}, .most = {-9}});
  all.add(2, {.most = {-12, 3}});
  all.close();
  EXPECT_THAT(all.places, SizeIs(2));
  EXPECT_THAT(all.places[0].said.at(0).ranks, ElementsAre(1));
  EXPECT_THAT(all.places[1].said.at(0).ranks, ElementsAre(0));
  EXPECT_EQ(all.any, std::string("\5\0", 2));
  EXPECT_THAT(all.sum, ElementsAre(3, -5));
  EXPECT_THAT(all.most, ElementsAre(-9, 3));
  EXPECT_EQ(all.note_rank, -1);
}

TEST(Agreement, KeepsTheFourTextsOfMostRanks) {
  Agreement all;
  for (int rank = 0; rank < 4'096; ++rank) {
    all.add(rank, {.equal = {rank < 100 ? std::to_string(rank) : "most"}});
  }
  all.close();
  const auto& place = all.places.at(0);
  ASSERT_THAT(place.said, SizeIs(Agreement::kMostTexts));
  EXPECT_EQ(place.said.back().text, "most");
  EXPECT_EQ(place.said.back().count, 3'996);
  EXPECT_THAT(place.said.back().ranks, SizeIs(Agreement::kMostRanks));
  EXPECT_EQ(place.said.back().ranks.front(), 100);
  EXPECT_LT(encoded_size(all), 400U);
}

// As in a tree of ranks, each of which merges the ranks below it and passes the result on.
TEST(Agreement, ComesOutTheSameHoweverItsPartsAreMerged) {
  const auto said_by = [](int rank) {
    return Saying{.equal = {"same", rank % 3 == 0 ? "third" : "other"},
                  .any = rank == 5 ? "\2" : "",
                  .sum = {rank},
                  .most = {rank % 7},
                  .note = rank > 10 ? "why " + std::to_string(rank) : ""};
  };
  Agreement whole;
  Agreement merged;
  for (const int first : {64, 0, 32, 96}) {
    Agreement part;
    for (int rank = first; rank < first + 32; ++rank) {
      whole.add(rank, said_by(rank));
      part.add(rank, said_by(rank));
    }
    part.close();
    WireWriter out;
    part.encode(out);
    const std::string bytes = out.take();
    WireReader in(bytes);
    merged.merge(Agreement::decode(in));
    EXPECT_TRUE(in.complete());
  }
  WireWriter all_at_once;
  WireWriter by_parts;
  whole.close();
  merged.close();
  whole.encode(all_at_once);
  merged.encode(by_parts);
  EXPECT_EQ(all_at_once.take(), by_parts.take());
}

TEST(Agreement, GivesEveryMessageToAllWhoAskForThat) {
  Agreement all;
  for (const int rank : {3, 1, 2, 0}) all.add(rank, message_to_all(std::to_string(rank / 2)));
  all.close();
  EXPECT_THAT(all.messages(std::vector<int>{0, 1, 2, 3}), ElementsAre("0", "0", "1", "1"));
  EXPECT_THAT(all.messages(std::vector<int>{3, 0}), ElementsAre("1", "0"));
  EXPECT_THAT(all.messages(std::vector<int>{}), IsEmpty());
  EXPECT_THROW(static_cast<void>(all.messages(std::vector<int>{4})), Error);
}

}  // namespace
}  // namespace hsdp::comm
