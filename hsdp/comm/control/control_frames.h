// The messages of the control connection. On the wire: body length (u32), type (u8), body.
//
// decode() accepts any bytes; it returns nullopt unless they are exactly one valid body.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/agreement.h"
#include "hsdp/comm/control.h"

namespace hsdp::comm {

enum class FrameType : std::uint8_t {
  kJoin = 1,        // rank -> hub: identifies the rank
  kWelcome = 2,     // hub -> rank: all have joined
  kRefuse = 3,      // hub -> rank: you cannot join; body: the reason
  kPost = 4,        // rank -> hub: the rank's part of an exchange
  kAnswer = 5,      // hub -> rank: the result of an exchange
  kBeat = 6,        // in both directions
  kFail = 7,        // in both directions: the world ended
  kGoodbye = 8,     // in both directions: an orderly exit; from a parent with the rank that leaves
  kProcessEnd = 9,  // rank -> hub: a process on my host ended; body: its rank
  kTell = 10,       // in both directions: one rank's message to another
  kGroup = 11,      // rank -> hub: the members of one of my groups, before its first exchange
  kMoved = 12,      // rank -> hub: I now speak through another rank; body: that rank
  kMerged = 13,     // relay -> parent: several ranks' parts of an exchange
  kBeats = 14,      // relay -> parent: the beats of several ranks
  kRelayed = 15,    // relay -> parent: a rank's frame; parent -> relay: a frame for a rank
};

constexpr std::size_t kFrameHeaderBytes = 5;
constexpr std::size_t kMaxFrameBytes = 64U << 20U;
constexpr std::size_t kMaxJoinBytes = 8U << 10U;  // limit for a peer that has not joined
constexpr std::uint32_t kProtocolVersion = 4;

// Header and body, ready to send and shared by all receivers.
using FrameBytes = std::shared_ptr<const std::string>;
[[nodiscard]] FrameBytes make_frame(FrameType type, std::string_view body);
[[nodiscard]] inline FrameType type_of(std::string_view frame) {
  return static_cast<FrameType>(frame[kFrameHeaderBytes - 1]);
}

struct JoinFrame {
  std::uint32_t version = kProtocolVersion;
  int rank = 0;
  int size = 1;
  int restart_count = 0;
  std::string job;
  std::string host;     // equal if descriptors can be passed: boot, user, network namespace
  std::string address;  // numeric, for data connections
  std::string process;  // random; the same when a process tries again
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<JoinFrame> decode(std::string_view body);
};

struct WelcomeFrame {
  std::string secret;              // given within one host, if the launcher gave none
  std::vector<std::string> hosts;  // one per rank
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<WelcomeFrame> decode(std::string_view body);
};

// The members, as ascending world ranks. The id is group_id() of them.
struct GroupFrame {
  std::vector<int> members;
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<GroupFrame> decode(std::string_view body);
};

struct PostFrame {
  std::uint64_t group = 0;
  std::string key;
  Saying saying;
  bool while_open = false;  // answered with nothing if a member has closed its world
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<PostFrame> decode(std::string_view body);
};

// A kPost of several ranks.
struct MergedFrame {
  std::uint64_t group = 0;
  std::string key;
  bool while_open = false;
  std::vector<int> ranks;  // ascending
  Agreement agreement;     // of these ranks
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<MergedFrame> decode(std::string_view body);
};

struct AnswerFrame {
  std::string exchange;                // exchange_name()
  std::optional<Agreement> agreement;  // none: a member closed, and the post was `while_open`
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<AnswerFrame> decode(std::string_view body);
  // The name in an encoded frame, which is all that a relay needs.
  [[nodiscard]] static std::string exchange_of(std::string_view body);
};

struct TellFrame {
  int peer = 0;  // rank -> hub: the receiver; hub -> rank: the sender
  std::string topic;
  std::string message;
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<TellFrame> decode(std::string_view body);
};

// One wait of a rank, as reported in its beat.
struct BeatWait {
  std::uint32_t id = 0;
  std::string operation;
  int bucket = -1;
  int peer = -1;
  std::uint64_t exchange = 0;  // hash of exchange_name(), 0: none
  std::chrono::milliseconds age{0};
};

struct BeatFrame {
  std::vector<BeatWait> waits;  // rank -> hub
  std::vector<int> missing;     // hub -> rank: ranks that have not joined yet
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<BeatFrame> decode(std::string_view body);
};

struct BeatsFrame {
  std::vector<std::pair<int, BeatFrame>> beats;  // by rank
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<BeatsFrame> decode(std::string_view body);
};

struct RelayedFrame {
  int rank = 0;
  FrameType type = FrameType::kTell;
  std::string body;
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<RelayedFrame> decode(std::string_view body);
};

// The body of a frame that holds only a rank: kProcessEnd, kMoved, kGoodbye of a parent.
[[nodiscard]] std::string rank_body(int rank);
[[nodiscard]] std::optional<int> rank_in(std::string_view body);

// A failure, and what its first witness was doing. A bare message only names the rank at fault;
// each rank adds its current operation and the time it waited.
struct WorldEnd {
  Failure failure;
  bool bare = false;
  std::string operation;
  int bucket = -1;
  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<WorldEnd> decode(std::string_view body);
};

[[nodiscard]] std::uint64_t group_id(std::span<const int> members);
[[nodiscard]] std::string exchange_name(std::string_view key, std::uint64_t group);
[[nodiscard]] std::uint64_t exchange_hash(std::string_view exchange);  // never 0

}  // namespace hsdp::comm
