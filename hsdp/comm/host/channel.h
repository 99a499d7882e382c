// An ordered stream of messages to and from one peer, which never blocks.
//
// Both sides know from the collective which message comes next and how long it is, so only the
// bytes travel. A message has at most message_bytes(). Calls that cannot complete return null or
// false; repeat them with the same arguments. Not thread-safe. A broken link ends the world through
// Control and throws.
#pragma once

#include <cstddef>

namespace hsdp::comm {

class Channel {
 public:
  virtual ~Channel() = default;

  // Where to write the next outgoing message; null while there is no space.
  [[nodiscard]] virtual std::byte* reserve() = 0;
  // Sends the first `size` bytes of the reserved message.
  virtual void commit(std::size_t size) = 0;
  // Sends a message from the caller's memory. False: call it again with the same arguments.
  [[nodiscard]] virtual bool send(const std::byte* data, std::size_t size) = 0;
  // True if no committed message still waits in this process.
  [[nodiscard]] virtual bool flush() = 0;

  // The next incoming message, of `size` bytes; null while it is incomplete. Valid until pop().
  [[nodiscard]] virtual const std::byte* front(std::size_t size) = 0;
  virtual void pop() = 0;
  // Receives the next message into the caller's memory. False: call it again.
  [[nodiscard]] virtual bool receive(std::byte* data, std::size_t size) = 0;
};

}  // namespace hsdp::comm
