// Control messages survive encoding, and no bytes whatever can harm their decoding.
#include "hsdp/comm/control/control_frames.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "hsdp/comm/control/wire_text.h"

namespace hsdp::comm {
namespace {

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

Saying saying() {
  return {.equal = {"text", std::nullopt, ""},
          .any = std::string("\1\0", 2),
          .sum = {-3, 5},
          .most = {7},
          .note = "why",
          .keeps_all = true};
}

Agreement agreement() {
  Agreement all;
  for (const int rank : {3, 0, 1, 9}) all.add(rank, saying());
  all.add(5, {.equal = {"another"}});
  all.close();
  return all;
}

// Whether the bytes decode as some frame.
std::vector<bool> decode_as_everything(const std::string& bytes) {
  return {JoinFrame::decode(bytes).has_value(),   WelcomeFrame::decode(bytes).has_value(),
          PostFrame::decode(bytes).has_value(),   AnswerFrame::decode(bytes).has_value(),
          BeatFrame::decode(bytes).has_value(),   WorldEnd::decode(bytes).has_value(),
          TellFrame::decode(bytes).has_value(),   GroupFrame::decode(bytes).has_value(),
          MergedFrame::decode(bytes).has_value(), BeatsFrame::decode(bytes).has_value(),
          RelayedFrame::decode(bytes).has_value()};
}

// Every field has a different value. A field that is never written would be noticed here, not
// between processes.
template <typename Frame>
std::string decoded_and_encoded(const Frame& frame) {
  const auto decoded = Frame::decode(frame.encode());
  EXPECT_TRUE(decoded);
  EXPECT_EQ(decoded->encode(), frame.encode());
  return frame.encode();
}

TEST(ControlFramesTest, WholeBodiesAreDecodedAndNoOthers) {
  const std::vector<std::string> bodies{
      decoded_and_encoded(join_frame()),
      decoded_and_encoded(WelcomeFrame{"secret", {"a", "b", "a", "a"}}),
      decoded_and_encoded(PostFrame{77, "key", saying(), true}),
      decoded_and_encoded(AnswerFrame{"name", agreement()}),
      decoded_and_encoded(beat_frame()),
      decoded_and_encoded(world_end()),
      decoded_and_encoded(TellFrame{5, "topic", std::string("\0x", 2)}),
      decoded_and_encoded(GroupFrame{{0, 1, 2, 3, 7, 11, 12, 40}}),
      decoded_and_encoded(MergedFrame{77, "key", true, {0, 1, 3, 5, 9}, agreement()}),
      decoded_and_encoded(BeatsFrame{{{4, beat_frame()}, {6, {}}}}),
      decoded_and_encoded(RelayedFrame{3, FrameType::kTell, "body"})};
  for (std::size_t kind = 0; kind < bodies.size(); ++kind) {
    for (std::size_t size = 0; size < bodies[kind].size(); ++size) {
      EXPECT_FALSE(decode_as_everything(bodies[kind].substr(0, size))[kind]) << kind << " " << size;
    }
    EXPECT_FALSE(decode_as_everything(bodies[kind] + "x")[kind]) << kind;
    for (const std::size_t size : {4U, 8U}) {  // counts larger than the body allocate nothing
      EXPECT_FALSE(decode_as_everything(std::string(size, '\xff'))[kind]) << kind;
    }
  }
}

TEST(ControlFramesTest, AnyBytesAreSafe) {
  std::mt19937 random(7);  // a fixed seed: the same bytes every time
  const std::vector<std::string> seeds{join_frame().encode(),
                                       beat_frame().encode(),
                                       world_end().encode(),
                                       std::string(64, '\0'),
                                       WelcomeFrame{"secret", {"a", "b", "a"}}.encode(),
                                       PostFrame{77, "key", saying(), false}.encode(),
                                       AnswerFrame{"name", agreement()}.encode(),
                                       GroupFrame{{0, 8, 16, 17}}.encode(),
                                       MergedFrame{7, "k", false, {1, 2}, agreement()}.encode(),
                                       BeatsFrame{{{4, beat_frame()}}}.encode()};
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = seeds[static_cast<std::size_t>(round) % seeds.size()];
    for (int flips = 0; flips < 3; ++flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    static_cast<void>(decode_as_everything(bytes));
  }
}

TEST(ControlFramesTest, ExchangesAreToldApart) {
  const std::uint64_t pair = group_id(std::vector<int>{0, 1});
  const std::uint64_t three = group_id(std::vector<int>{0, 1, 2});
  EXPECT_NE(exchange_name("a", pair), exchange_name("a", three));
  EXPECT_NE(exchange_name("a", pair), exchange_name("b", pair));
  EXPECT_NE(exchange_hash(exchange_name("a", pair)), exchange_hash(exchange_name("b", pair)));
  EXPECT_NE(exchange_hash(""), 0U);
}

// Each group of a mesh is a single run.
TEST(ControlFramesTest, MembersOfALargeGroupTakeFewBytes) {
  std::vector<int> shards;
  for (int rank = 5; rank < 4'096; rank += 8) shards.push_back(rank);
  const std::string bytes = GroupFrame{shards}.encode();
  EXPECT_LE(bytes.size(), 16U);
  EXPECT_EQ(GroupFrame::decode(bytes)->members, shards);
  // However many members it claims to have.
  WireWriter out;
  for (const std::uint64_t number : {1U, 0U, 1U, (1U << 20U) + 1}) out.number(number);
  EXPECT_FALSE(GroupFrame::decode(out.take()));
}

}  // namespace
}  // namespace hsdp::comm
