// One end of a framed control connection: over a socket (ControlLink), or over memory if ranks are
// threads or simulated.
#pragma once

#include "hsdp/comm/control/control_frames.h"

namespace hsdp::comm {

class FrameLink {
 public:
  FrameLink() = default;
  FrameLink(const FrameLink&) = delete;
  FrameLink& operator=(const FrameLink&) = delete;
  virtual ~FrameLink() = default;

  virtual void send(FrameBytes frame) = 0;      // queues; never blocks
  [[nodiscard]] virtual bool idle() const = 0;  // the queue is empty
  [[nodiscard]] virtual bool open() const = 0;
  // Closes this direction once everything is sent: the peer reads it all, then sees the end.
  virtual void finish_sending() = 0;
  virtual void close() = 0;
};

}  // namespace hsdp::comm
