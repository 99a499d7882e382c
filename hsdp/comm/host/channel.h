// An ordered stream of messages to and from one peer, never blocking.
//
// Both sides know from the collective which message comes next and how long it is, so nothing but
// the bytes travels. A message is at most message_bytes() long. Calls that cannot complete return
// null or false and are repeated with the same arguments. One thread at a time. A broken link ends
// the world through Control and throws.
#pragma once

#include <cstddef>

namespace hsdp::comm {

class Channel {
 public:
  virtual ~Channel() = default;

  // A place to write the next outgoing message into; null while there is none.
  [[nodiscard]] virtual std::byte* reserve() = 0;
  // Sends the first `size` bytes of it.
  virtual void commit(std::size_t size) = 0;
  // Sends a message from the caller's memory; false: call again with the same arguments.
  [[nodiscard]] virtual bool send(const std::byte* data, std::size_t size) = 0;
  // True when nothing that was committed still waits in this process.
  [[nodiscard]] virtual bool flush() = 0;

  // The next incoming message, which has `size` bytes; null while it is incomplete. Valid until
  // pop().
  [[nodiscard]] virtual const std::byte* front(std::size_t size) = 0;
  virtual void pop() = 0;
  // Receives the next message into the caller's memory; false: call again.
  [[nodiscard]] virtual bool receive(std::byte* data, std::size_t size) = 0;
};

}  // namespace hsdp::comm
