#include "hsdp/comm/control/descriptor_channel.h"

#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

namespace hsdp::comm {
namespace asio = boost::asio;
using boost::system::error_code;

DescriptorChannel::DescriptorChannel(asio::io_context& io, UniqueFd socket)
    : socket_(io), read_retry_(io), write_retry_(io), guard_(socket.get()) {
  socket_.assign(socket.release());
}

void DescriptorChannel::start(Handlers handlers) {
  set_handlers(std::move(handlers));
  read_next();
}

void DescriptorChannel::set_handlers(Handlers handlers) {
  handlers_ = std::make_shared<Handlers>(std::move(handlers));
}

void DescriptorChannel::close() {
  if (!open_) return;
  open_ = false;
  guard_.release();
  error_code ignored;
  socket_.close(ignored);
  read_retry_.cancel();
  write_retry_.cancel();
  handlers_.reset();
  queue_.clear();
}

std::optional<pid_t> DescriptorChannel::peer_pid() {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (!open_ ||
      ::getsockopt(socket_.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return std::nullopt;
  }
  return peer.pid > 0 ? std::optional<pid_t>(peer.pid) : std::nullopt;
}

void DescriptorChannel::read_next() {
  if (!open_) return;
  socket_.async_wait(asio::posix::stream_descriptor::wait_read,
                     [self = shared_from_this()](error_code error) {
                       if (error) return;
                       Read read = Read::kMessage;
                       while (self->open_ && read == Read::kMessage) read = self->read_one();
                       if (read == Read::kNoRoom) return self->read_later();
                       self->read_next();
                     });
}

void DescriptorChannel::read_later() {
  if (!open_) return;
  const auto handlers = handlers_;
  if (handlers->on_limit) handlers->on_limit();
  read_retry_.expires_after(std::chrono::milliseconds(50));
  read_retry_.async_wait([self = shared_from_this()](error_code error) {
    if (!error) self->read_next();
  });
}

// Peeks first. If no descriptor number is free, the message stays in the socket; reading it would
// lose its descriptor. Other threads may use up numbers at any time.
DescriptorChannel::Read DescriptorChannel::read_one() {
  std::vector<char> text(kMaxTextBytes);
  iovec part{text.data(), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const int socket = socket_.native_handle();
  const ssize_t size = ::recvmsg(socket, &message, MSG_PEEK | MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return Read::kNothing;
  UniqueFd fd;
  const cmsghdr* const header = size > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof number);
    fd.reset(number);
  }
  if (size > 0 && !fd && (message.msg_flags & MSG_CTRUNC) != 0) return Read::kNoRoom;
  if (size <= 0 || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    close();
    return Read::kNothing;
  }
  ::recv(socket, text.data() + size, 0, MSG_DONTWAIT);  // consumes what was peeked
  const auto handlers = handlers_;
  if (handlers->on_message) {
    handlers->on_message(std::string(text.data(), static_cast<std::size_t>(size)), std::move(fd));
  }
  return Read::kMessage;
}

void DescriptorChannel::send(std::string text, std::shared_ptr<const UniqueFd> fd) {
  if (!open_) return;
  queue_.push_back({std::move(text), std::move(fd)});
  if (!writing_) write_ready();
}

bool DescriptorChannel::write_one(const Message& message) {
  // sendmsg does not write through msg_iov; its type is shared with recvmsg.
  iovec part{const_cast<char*>(message.text.data()), message.text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (message.fd) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int number = message.fd->get();
    std::memcpy(CMSG_DATA(rights), &number, sizeof number);
  }
  return ::sendmsg(socket_.native_handle(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

void DescriptorChannel::write_ready() {
  writing_ = false;
  while (open_ && !queue_.empty()) {
    if (write_one(queue_.front())) {
      queue_.pop_front();
    } else if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ETOOMANYREFS) {
      return write_later();
    } else {
      // The peer is gone, as its control connection reports; still read what it sent.
      queue_.clear();
    }
  }
}

void DescriptorChannel::write_later() {
  writing_ = true;
  write_retry_.expires_after(std::chrono::milliseconds(2));
  write_retry_.async_wait([self = shared_from_this()](error_code error) {
    if (!error) self->write_ready();
  });
}

}  // namespace hsdp::comm
