// The control messages survive their encoding, and no bytes at all can harm their decoding.
#include "hsdp/comm/control/control_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace hsdp::comm {
namespace {

using ::testing::ElementsAre;

JoinFrame join_frame() {
  return {.rank = 3,
          .size = 8,
          .restart_count = 2,
          .job = "job",
          .host = std::string("ho\0st", 5),
          .address = "10.0.0.1",
          .process = "1234"};
}

BeatFrame beat_frame() {
  return {.waits = {{7, "all_reduce", 3, -1, 99, std::chrono::milliseconds(1'250)},
                    {8, "", -1, 4, 0, std::chrono::milliseconds(0)}},
          .missing = {1, 5}};
}

WorldEnd world_end() {
  return {.failure = {FailureKind::kMismatch, "message", {0, 2}},
          .bare = true,
          .operation = "barrier",
          .bucket = 4};
}

TEST(ControlFramesTest, WhatIsEncodedIsDecoded) {
  const auto join = JoinFrame::decode(join_frame().encode());
  ASSERT_TRUE(join);
  EXPECT_EQ(join->version, kProtocolVersion);
  EXPECT_EQ(join->rank, 3);
  EXPECT_EQ(join->size, 8);
  EXPECT_EQ(join->restart_count, 2);
  EXPECT_EQ(join->job, "job");
  EXPECT_EQ(join->host, std::string("ho\0st", 5));
  EXPECT_EQ(join->address, "10.0.0.1");
  EXPECT_EQ(join->process, "1234");
  const auto post = PostFrame::decode(PostFrame{"key", {0, 1}, "message", true}.encode());
  ASSERT_TRUE(post);
  EXPECT_EQ(post->members, (std::vector<int>{0, 1}));
  EXPECT_TRUE(post->while_open);
  const auto beat = BeatFrame::decode(beat_frame().encode());
  ASSERT_TRUE(beat);
  ASSERT_EQ(beat->waits.size(), 2U);
  EXPECT_EQ(beat->waits[0].id, 7U);
  EXPECT_EQ(beat->waits[0].operation, "all_reduce");
  EXPECT_EQ(beat->waits[0].bucket, 3);
  EXPECT_EQ(beat->waits[0].peer, -1);
  EXPECT_EQ(beat->waits[0].exchange, 99U);
  EXPECT_EQ(beat->waits[0].age.count(), 1'250);
  EXPECT_EQ(beat->waits[1].peer, 4);
  EXPECT_THAT(beat->missing, ElementsAre(1, 5));
  const auto failed = WorldEnd::decode(world_end().encode());
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->failure.kind, FailureKind::kMismatch);
  EXPECT_EQ(failed->failure.message, "message");
  EXPECT_THAT(failed->failure.ranks, ElementsAre(0, 2));
  EXPECT_TRUE(failed->bare);
  EXPECT_EQ(failed->operation, "barrier");
  EXPECT_EQ(failed->bucket, 4);
  const auto told = TellFrame::decode(TellFrame{5, "topic", std::string("\0x", 2)}.encode());
  ASSERT_TRUE(told);
  EXPECT_EQ(told->peer, 5);
  EXPECT_EQ(told->topic, "topic");
  EXPECT_EQ(told->message, std::string("\0x", 2));
  const auto answer = AnswerFrame::decode(AnswerFrame{"name", {"a", "", "c"}}.encode());
  ASSERT_TRUE(answer);
  EXPECT_THAT(answer->messages, ElementsAre("a", "", "c"));
}

// True for the frames that decode at all.
std::vector<bool> decode_as_everything(const std::string& bytes) {
  return {JoinFrame::decode(bytes).has_value(), WelcomeFrame::decode(bytes).has_value(),
          PostFrame::decode(bytes).has_value(), AnswerFrame::decode(bytes).has_value(),
          BeatFrame::decode(bytes).has_value(), WorldEnd::decode(bytes).has_value(),
          TellFrame::decode(bytes).has_value()};
}

TEST(ControlFramesTest, ShortenedAndLengthenedBodiesAreRefused) {
  const std::vector<std::string> bodies{join_frame().encode(),
                                        WelcomeFrame{"secret", {"a", "b"}}.encode(),
                                        PostFrame{"key", {0, 1}, "message", true}.encode(),
                                        AnswerFrame{"name", {"a", "b"}}.encode(),
                                        beat_frame().encode(),
                                        world_end().encode(),
                                        TellFrame{1, "topic", "message"}.encode()};
  for (std::size_t kind = 0; kind < bodies.size(); ++kind) {
    EXPECT_TRUE(decode_as_everything(bodies[kind])[kind]);
    for (std::size_t size = 0; size < bodies[kind].size(); ++size) {
      EXPECT_FALSE(decode_as_everything(bodies[kind].substr(0, size))[kind]) << kind << " " << size;
    }
    EXPECT_FALSE(decode_as_everything(bodies[kind] + "x")[kind]) << kind;
    for (const std::size_t size : {4U, 8U}) {  // counts beyond the body allocate nothing
      EXPECT_FALSE(decode_as_everything(std::string(size, '\xff'))[kind]) << kind;
    }
  }
}

TEST(ControlFramesTest, AnyBytesAreSafe) {
  std::mt19937 random(7);  // fixed: the same bytes every time
  const std::vector<std::string> seeds{join_frame().encode(), beat_frame().encode(),
                                       world_end().encode(), std::string(64, '\0')};
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = seeds[static_cast<std::size_t>(round) % seeds.size()];
    for (int flips = 0; flips < 3; ++flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    static_cast<void>(decode_as_everything(bytes));
  }
}

TEST(ControlFramesTest, ExchangesAreToldApart) {
  const std::vector<int> pair{0, 1};
  const std::vector<int> three{0, 1, 2};
  EXPECT_NE(exchange_name("a", pair), exchange_name("a", three));
  EXPECT_NE(exchange_name("a", pair), exchange_name("b", pair));
  EXPECT_NE(exchange_hash(exchange_name("a", pair)), exchange_hash(exchange_name("b", pair)));
  EXPECT_NE(exchange_hash(""), 0U);
}

}  // namespace
}  // namespace hsdp::comm
