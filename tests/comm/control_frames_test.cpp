// The control messages survive their encoding, and no bytes at all can harm their decoding.
#include "hsdp/comm/control/control_frames.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

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

// True for the frames that decode at all.
std::vector<bool> decode_as_everything(const std::string& bytes) {
  return {JoinFrame::decode(bytes).has_value(), WelcomeFrame::decode(bytes).has_value(),
          PostFrame::decode(bytes).has_value(), AnswerFrame::decode(bytes).has_value(),
          BeatFrame::decode(bytes).has_value(), WorldEnd::decode(bytes).has_value(),
          TellFrame::decode(bytes).has_value()};
}

// No field has the value of another. Those that nobody writes would be missed between processes.
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
      decoded_and_encoded(WelcomeFrame{"secret", {"a", "b"}}),
      decoded_and_encoded(PostFrame{"key", {0, 1}, "message", true}),
      decoded_and_encoded(AnswerFrame{"name", {"a", "", "c"}}),
      decoded_and_encoded(beat_frame()),
      decoded_and_encoded(world_end()),
      decoded_and_encoded(TellFrame{5, "topic", std::string("\0x", 2)})};
  for (std::size_t kind = 0; kind < bodies.size(); ++kind) {
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
