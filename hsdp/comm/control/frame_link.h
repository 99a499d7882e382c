// One end of a framed control connection, as its user sees it: over a socket (ControlLink), or over
// memory, where ranks are threads or simulated.
#pragma once

#include "hsdp/comm/control/control_frames.h"

namespace hsdp::comm {

class FrameLink {
 public:
  FrameLink() = default;
  FrameLink(const FrameLink&) = delete;
  FrameLink& operator=(const FrameLink&) = delete;
  virtual ~FrameLink() = default;

  virtual void send(FrameBytes frame) = 0;      // queues, never blocks
  [[nodiscard]] virtual bool idle() const = 0;  // nothing is queued
  [[nodiscard]] virtual bool open() const = 0;
  // Closes this direction once all is sent: the peer reads everything, then the end.
  virtual void finish_sending() = 0;
  virtual void close() = 0;
};

}  // namespace hsdp::comm
