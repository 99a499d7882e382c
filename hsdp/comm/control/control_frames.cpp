#include "hsdp/comm/control/control_frames.h"

#include <algorithm>
#include <map>
#include <utility>

#include "hsdp/comm/control/wire_text.h"

namespace hsdp::comm {
namespace {

constexpr std::size_t kMinWaitBytes = 28;

// Writes each text once, with the places that have it.
void write_texts(WireWriter& out, const std::vector<std::string>& texts) {
  std::map<std::string_view, std::vector<int>> places;
  for (std::size_t i = 0; i < texts.size(); ++i) places[texts[i]].push_back(static_cast<int>(i));
  out.number(places.size());
  for (const auto& [text, at] : places) {
    out.short_text(text);
    out.runs(at);
  }
}

std::vector<std::string> read_texts(WireReader& in) {
  std::vector<std::string> texts;
  for (std::size_t left = in.short_count(); left > 0; --left) {
    const std::string_view text = in.short_text();
    for (const int place : in.runs()) {
      const auto at = static_cast<std::size_t>(place);
      if (at >= kMostInRuns) {
        in.fail();
        return {};
      }
      texts.resize(std::max(texts.size(), at + 1));
      texts[at] = text;
    }
  }
  return texts;
}

template <typename T>
std::optional<T> checked(const WireReader& in, T value) {
  if (!in.complete()) return std::nullopt;
  return std::optional<T>(std::move(value));
}

}  // namespace

FrameBytes make_frame(FrameType type, std::string_view body) {
  WireWriter out;
  out.u32(static_cast<std::uint32_t>(body.size()));
  std::string bytes = out.take();
  bytes += static_cast<char>(type);
  bytes.append(body);
  return std::make_shared<const std::string>(std::move(bytes));
}

std::string JoinFrame::encode() const {
  WireWriter out;
  out.u32(version);
  out.i32(rank);
  out.i32(size);
  out.i32(restart_count);
  out.text(job);
  out.text(host);
  out.text(address);
  out.text(process);
  return out.take();
}

std::optional<JoinFrame> JoinFrame::decode(std::string_view body) {
  WireReader in(body);
  JoinFrame frame;
  frame.version = in.u32();
  frame.rank = in.i32();
  frame.size = in.i32();
  frame.restart_count = in.i32();
  frame.job = in.text();
  frame.host = in.text();
  frame.address = in.text();
  // Version 1 lacks this field and must be told that it is too old.
  if (frame.version >= 2) frame.process = in.text();
  return checked(in, std::move(frame));
}

std::string WelcomeFrame::encode() const {
  WireWriter out;
  out.text(secret);
  write_texts(out, hosts);
  return out.take();
}

std::optional<WelcomeFrame> WelcomeFrame::decode(std::string_view body) {
  WireReader in(body);
  WelcomeFrame frame;
  frame.secret = in.text();
  frame.hosts = read_texts(in);
  return checked(in, std::move(frame));
}

std::string GroupFrame::encode() const {
  WireWriter out;
  out.runs(members);
  return out.take();
}

std::optional<GroupFrame> GroupFrame::decode(std::string_view body) {
  WireReader in(body);
  GroupFrame frame;
  frame.members = in.runs();
  return checked(in, std::move(frame));
}

std::string PostFrame::encode() const {
  WireWriter out;
  out.u64(group);
  out.text(key);
  saying.encode(out);
  out.u32(while_open ? 1 : 0);
  return out.take();
}

std::optional<PostFrame> PostFrame::decode(std::string_view body) {
  WireReader in(body);
  PostFrame frame;
  frame.group = in.u64();
  frame.key = in.text();
  frame.saying = Saying::decode(in);
  frame.while_open = in.u32() != 0;
  return checked(in, std::move(frame));
}

std::string MergedFrame::encode() const {
  WireWriter out;
  out.u64(group);
  out.short_text(key);
  out.number(while_open ? 1 : 0);
  out.runs(ranks);
  agreement.encode(out);
  return out.take();
}

std::optional<MergedFrame> MergedFrame::decode(std::string_view body) {
  WireReader in(body);
  MergedFrame frame;
  frame.group = in.u64();
  frame.key = in.short_text();
  frame.while_open = in.number() != 0;
  frame.ranks = in.runs();
  frame.agreement = Agreement::decode(in);
  return checked(in, std::move(frame));
}

std::string AnswerFrame::encode() const {
  WireWriter out;
  out.text(exchange);
  out.u32(agreement ? 1 : 0);
  if (agreement) agreement->encode(out);
  return out.take();
}

std::optional<AnswerFrame> AnswerFrame::decode(std::string_view body) {
  WireReader in(body);
  AnswerFrame frame;
  frame.exchange = in.text();
  if (in.u32() != 0) frame.agreement = Agreement::decode(in);
  return checked(in, std::move(frame));
}

std::string AnswerFrame::exchange_of(std::string_view body) {
  WireReader in(body);
  return std::string(in.text());
}

std::string TellFrame::encode() const {
  WireWriter out;
  out.i32(peer);
  out.text(topic);
  out.text(message);
  return out.take();
}

std::optional<TellFrame> TellFrame::decode(std::string_view body) {
  WireReader in(body);
  TellFrame frame;
  frame.peer = in.i32();
  frame.topic = in.text();
  frame.message = in.text();
  return checked(in, std::move(frame));
}

std::string BeatFrame::encode() const {
  WireWriter out;
  out.u32(static_cast<std::uint32_t>(waits.size()));
  for (const BeatWait& wait : waits) {
    out.u32(wait.id);
    out.text(wait.operation);
    out.i32(wait.bucket);
    out.i32(wait.peer);
    out.u64(wait.exchange);
    out.u32(static_cast<std::uint32_t>(wait.age.count()));
  }
  out.ranks(missing);
  return out.take();
}

std::optional<BeatFrame> BeatFrame::decode(std::string_view body) {
  WireReader in(body);
  BeatFrame frame;
  frame.waits.resize(in.count(kMinWaitBytes));
  for (BeatWait& wait : frame.waits) {
    wait.id = in.u32();
    wait.operation = in.text();
    wait.bucket = in.i32();
    wait.peer = in.i32();
    wait.exchange = in.u64();
    wait.age = std::chrono::milliseconds(in.u32());
  }
  frame.missing = in.ranks();
  return checked(in, std::move(frame));
}

std::string BeatsFrame::encode() const {
  WireWriter out;
  out.number(beats.size());
  for (const auto& [rank, beat] : beats) {
    out.i32(rank);
    out.short_text(beat.encode());
  }
  return out.take();
}

std::optional<BeatsFrame> BeatsFrame::decode(std::string_view body) {
  WireReader in(body);
  BeatsFrame frame;
  for (std::size_t left = in.short_count(); left > 0; --left) {
    const int rank = in.i32();
    auto beat = BeatFrame::decode(in.short_text());
    if (!beat) return std::nullopt;
    frame.beats.emplace_back(rank, std::move(*beat));
  }
  return checked(in, std::move(frame));
}

std::string RelayedFrame::encode() const {
  WireWriter out;
  out.i32(rank);
  out.number(static_cast<std::uint64_t>(type));
  out.short_text(body);
  return out.take();
}

std::optional<RelayedFrame> RelayedFrame::decode(std::string_view body) {
  WireReader in(body);
  RelayedFrame frame;
  frame.rank = in.i32();
  frame.type = static_cast<FrameType>(in.number());
  frame.body = in.short_text();
  return checked(in, std::move(frame));
}

std::string rank_body(int rank) {
  WireWriter out;
  out.i32(rank);
  return out.take();
}

std::optional<int> rank_in(std::string_view body) {
  WireReader in(body);
  const int rank = in.i32();
  return in.complete() ? std::optional(rank) : std::nullopt;
}

std::string WorldEnd::encode() const {
  WireWriter out;
  out.u32(static_cast<std::uint32_t>(failure.kind));
  out.text(failure.message);
  out.ranks(failure.ranks);
  out.u32(bare ? 1 : 0);
  out.text(operation);
  out.i32(bucket);
  return out.take();
}

std::optional<WorldEnd> WorldEnd::decode(std::string_view body) {
  WireReader in(body);
  WorldEnd world_end;
  const std::uint32_t kind = in.u32();
  if (kind > static_cast<std::uint32_t>(FailureKind::kAborted)) return std::nullopt;
  world_end.failure.kind = static_cast<FailureKind>(kind);
  world_end.failure.message = in.text();
  world_end.failure.ranks = in.ranks();
  world_end.bare = in.u32() != 0;
  world_end.operation = in.text();
  world_end.bucket = in.i32();
  return checked(in, std::move(world_end));
}

std::uint64_t group_id(std::span<const int> members) {
  WireWriter out;
  out.runs(members);
  return exchange_hash(out.take());
}

std::string exchange_name(std::string_view key, std::uint64_t group) {
  WireWriter out;
  out.u64(group);
  return out.take().append(key);
}

std::uint64_t exchange_hash(std::string_view exchange) {
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a
  for (const char c : exchange) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  return hash == 0 ? 1 : hash;
}

}  // namespace hsdp::comm
