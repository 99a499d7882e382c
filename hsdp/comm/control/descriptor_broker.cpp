#include "hsdp/comm/control/descriptor_broker.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/descriptor_limit.h"

namespace hsdp::comm {
namespace asio = boost::asio;
using boost::system::error_code;

namespace {

constexpr const char* kHello = "hsdp descriptors";
constexpr std::chrono::milliseconds kBetweenAttempts{50};

}  // namespace

std::string DescriptorBroker::hello(int rank) {
  WireWriter out;
  out.text(kHello);
  out.i32(rank);
  return out.take();
}

std::string DescriptorBroker::envelope(const std::string& exchange, int from) {
  WireWriter out;
  out.text(exchange);
  out.i32(from);
  return out.take();
}

bool DescriptorBroker::open_envelope(const std::string& text, std::string& exchange, int& from) {
  WireReader in(text);
  exchange = in.text();
  from = in.i32();
  return in.complete();
}

DescriptorBroker::DescriptorBroker(asio::io_context& io, UniqueFd listener,
                                   std::vector<int> local_ranks, Handlers handlers)
    : io_(io),
      listener_(io),
      listener_guard_(listener.get()),
      accept_retry_(io),
      deliver_retry_(io),
      local_ranks_(std::move(local_ranks)),
      handlers_(std::move(handlers)) {
  listener_.assign(listener.release());
  accept_next();
}

DescriptorBroker::~DescriptorBroker() {
  *alive_ = false;
  listener_guard_.release();
  for (const auto& stranger : strangers_) stranger->close();
  for (const auto& [rank, channel] : channels_) channel->close();
}

void DescriptorBroker::accept_next() {
  listener_.async_wait(asio::posix::stream_descriptor::wait_read,
                       [this, alive = alive_](error_code error) {
                         if (!error && *alive) accept_one();
                       });
}

void DescriptorBroker::accept_one() {
  UniqueFd socket(
      ::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket && is_descriptor_limit(errno)) {
    handlers_.on_limit();
    accept_retry_.expires_after(kBetweenAttempts);
    return accept_retry_.async_wait([this, alive = alive_](error_code error) {
      if (!error && *alive) accept_next();
    });
  }
  if (socket) {
    auto channel = std::make_shared<DescriptorChannel>(io_, std::move(socket));
    strangers_.push_back(channel);
    std::weak_ptr<DescriptorChannel> weak = channel;
    DescriptorChannel::Handlers handlers;
    handlers.on_message = [this, alive = alive_, weak](const std::string& text, const UniqueFd&) {
      const auto self = weak.lock();
      if (*alive && self) greet(self, text);
    };
    handlers.on_limit = handlers_.on_limit;
    channel->start(std::move(handlers));
  }
  accept_next();
}

void DescriptorBroker::greet(const std::shared_ptr<DescriptorChannel>& channel,
                             const std::string& text) {
  std::string greeting;
  int rank = -1;
  const bool known = open_envelope(text, greeting, rank) && greeting == kHello &&
                     std::binary_search(local_ranks_.begin(), local_ranks_.end(), rank) &&
                     !channels_.contains(rank);
  std::erase(strangers_, channel);
  if (!known) return channel->close();
  channels_[rank] = channel;
  DescriptorChannel::Handlers handlers;
  handlers.on_message = [this, alive = alive_, rank](const std::string& exchange, UniqueFd fd) {
    if (*alive && fd) post(rank, exchange, std::move(fd));
  };
  handlers.on_limit = handlers_.on_limit;
  channel->set_handlers(std::move(handlers));
  if (const auto pid = channel->peer_pid(); pid && !handlers_.is_watched(rank)) {
    watches_[rank] =
        std::make_unique<ProcessWatch>(io_, *pid, [this, rank] { handlers_.on_process_end(rank); });
  }
  if (channels_.size() + 1 < local_ranks_.size()) return;
  listener_guard_.release();
  error_code ignored;
  listener_.close(ignored);
}

std::string DescriptorBroker::name(std::string_view key, std::span<const int> members) {
  WireWriter out;
  out.short_text(key);
  out.runs(members);
  return out.take();
}

void DescriptorBroker::post(int rank, const std::string& exchange, UniqueFd fd) {
  WireReader in(exchange);
  static_cast<void>(in.short_text());
  const std::vector<int> members = in.runs();
  if (!in.complete() ||
      !std::includes(local_ranks_.begin(), local_ranks_.end(), members.begin(), members.end()) ||
      !std::binary_search(members.begin(), members.end(), rank)) {
    return;
  }
  auto& posted = pending_[exchange];
  posted[rank] = std::make_shared<const UniqueFd>(std::move(fd));
  if (posted.size() < members.size()) return;
  const auto all = std::move(posted);
  pending_.erase(exchange);
  for (const int to : members) {
    for (const auto& [from, descriptor] : all) {
      if (from == to) continue;
      if (to == local_ranks_.front()) {
        own_.push_back({exchange, from, descriptor});
      } else if (const auto channel = channels_.find(to); channel != channels_.end()) {
        channel->second->send(envelope(exchange, from), descriptor);
      }
    }
  }
  deliver_own();
}

void DescriptorBroker::drop_needless_watches() {
  std::erase_if(watches_, [this](const auto& watch) { return handlers_.is_watched(watch.first); });
}

void DescriptorBroker::deliver_own() {
  for (; !own_.empty(); own_.pop_front()) {
    const OwnDelivery& next = own_.front();
    UniqueFd copy(::fcntl(next.fd->get(), F_DUPFD_CLOEXEC, 0));
    if (!copy && is_descriptor_limit(errno)) {
      handlers_.on_limit();
      deliver_retry_.expires_after(kBetweenAttempts);
      return deliver_retry_.async_wait([this, alive = alive_](error_code error) {
        if (!error && *alive) deliver_own();
      });
    }
    handlers_.to_own(next.exchange, next.from, std::move(copy));
  }
}

}  // namespace hsdp::comm
