// Decodes arbitrary bytes as each message of the control connection. Decoding must do no harm, and
// what it yields must survive being encoded and decoded again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "hsdp/comm/control/control_frames.h"

namespace {

template <typename Frame>
void decode(std::string_view bytes) {
  const auto frame = Frame::decode(bytes);
  if (!frame) return;
  const std::string again = frame->encode();
  const auto twice = Frame::decode(again);
  if (!twice || twice->encode() != again) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  static_cast<void>(hsdp::comm::JoinFrame::decode(bytes));  // also accepts an old version
  decode<hsdp::comm::WelcomeFrame>(bytes);
  decode<hsdp::comm::GroupFrame>(bytes);
  decode<hsdp::comm::PostFrame>(bytes);
  decode<hsdp::comm::AnswerFrame>(bytes);
  decode<hsdp::comm::BeatFrame>(bytes);
  decode<hsdp::comm::WorldEnd>(bytes);
  decode<hsdp::comm::TellFrame>(bytes);
  decode<hsdp::comm::MergedFrame>(bytes);
  decode<hsdp::comm::BeatsFrame>(bytes);
  decode<hsdp::comm::RelayedFrame>(bytes);
  return 0;
}
