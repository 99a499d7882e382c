#include "hsdp/comm/control/process_control.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/retry.h"
#include "hsdp/error.h"

namespace hsdp::comm {

ProcessControl::~ProcessControl() {
  if (is_usable()) return;
  // Thread and descriptors belong to the parent: a child cannot join, close or free them.
  static_cast<void>(loop_.release());
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): left alive on purpose
  static_cast<void>(new (std::nothrow) std::shared_ptr<ControlState>(state()));
}

bool ProcessControl::shares_memory_with(int peer) const {
  return peer >= 0 && peer < size() && shares_[static_cast<std::size_t>(peer)];
}

std::vector<UniqueFd> ProcessControl::exchange_descriptors(std::string_view key,
                                                           std::span<const int> members, int fd) {
  require_usable();
  require_member(members);
  for (const int member : members) {
    if (shares_memory_with(member)) continue;
    throw UsageError("control: exchange of descriptors: rank " + std::to_string(member) +
                     " cannot be passed any (rank " + std::to_string(rank()) + ")");
  }
  const std::string exchange = DescriptorBroker::name(key, members);
  if (exchange.size() > DescriptorChannel::kMaxTextBytes / 2) {
    throw UsageError("control: exchange of descriptors: key or group too large");
  }
  UniqueFd copy = wait_out_limit(std::chrono::steady_clock::now() + timeout(), [&] {
    throw_if_failed();
    UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!own) throw_if_descriptor_limit("control: cannot pass descriptor " + std::to_string(fd));
    return own;
  });
  if (!copy) {
    throw Error("control: cannot pass descriptor " + std::to_string(fd) + ": " +
                std::strerror(errno));
  }
  if (members.size() == 1) {
    std::vector<UniqueFd> own(1);
    return own;
  }
  loop_->send_descriptor(exchange, std::move(copy));
  // The ranks also meet at rank 0: unlike the broker, it knows which ones are missing.
  const WaitState waiting{"exchange_descriptors"};
  static_cast<void>(this->exchange(std::string(key) + " descriptors", members, "", waiting));
  return state()->take_descriptors(exchange, members, rank(), waiting);
}

}  // namespace hsdp::comm
