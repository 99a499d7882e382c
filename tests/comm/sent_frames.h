// A link whose other end keeps what is sent.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/control/frame_link.h"

namespace hsdp::comm {

class Sent final : public FrameLink {
 public:
  void send(FrameBytes frame) override { frames.push_back(std::move(frame)); }
  [[nodiscard]] bool idle() const override { return false; }
  [[nodiscard]] bool open() const override { return is_open; }
  void finish_sending() override { is_finished = true; }
  void close() override { is_open = false; }

  [[nodiscard]] std::vector<FrameType> types() const {
    std::vector<FrameType> all;
    for (const FrameBytes& frame : frames) all.push_back(type_of(*frame));
    return all;
  }
  [[nodiscard]] std::string_view body(std::size_t i) const {
    return std::string_view(*frames.at(i)).substr(kFrameHeaderBytes);
  }

  std::vector<FrameBytes> frames;
  bool is_open = true;
  bool is_finished = false;
};

}  // namespace hsdp::comm
