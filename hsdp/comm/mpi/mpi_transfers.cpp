#include "hsdp/comm/mpi/mpi_transfers.h"

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/mpi/mpi_library.h"

namespace hsdp::comm {

struct MpiTransfers::Pending {
  struct Message {
    std::byte* data = nullptr;
    std::size_t left = 0;  // not yet handed to MPI
    int peer = 0;
    bool is_sent = false;
  };

  std::shared_ptr<MpiLink> link;
  MPI_Comm comm = MPI_COMM_NULL;
  int tag = 0;
  std::vector<Message> messages;
  std::vector<MPI_Request> requests;  // the current piece of each message
  std::vector<int> completed;
  std::vector<std::shared_ptr<void>> kept;

  void add(Message message) {
    if (message.left == 0) return;
    messages.push_back(message);
    requests.push_back(MPI_REQUEST_NULL);
    completed.resize(messages.size());
    post(messages.size() - 1);
  }

  void post(std::size_t index) {
    Message& message = messages[index];
    MPI_Request* const request = &requests[index];
    const std::size_t size = std::min(message.left, kPieceBytes);
    const int count = static_cast<int>(size);
    check_mpi(message.is_sent
                  ? MPI_Isend(message.data, count, MPI_BYTE, message.peer, tag, comm, request)
                  : MPI_Irecv(message.data, count, MPI_BYTE, message.peer, tag, comm, request),
              message.is_sent ? "MPI_Isend" : "MPI_Irecv");
    message.data += size;
    message.left -= size;
  }

  // The indices of the messages whose current piece is done.
  std::span<const int> take_completed() {
    int count = 0;
    check_mpi(MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count,
                           completed.data(), MPI_STATUSES_IGNORE),
              "a transfer");
    return std::span(completed).first(count == MPI_UNDEFINED ? 0 : static_cast<std::size_t>(count));
  }

  [[nodiscard]] bool is_done() const {
    return std::ranges::all_of(requests, [](const auto& r) { return r == MPI_REQUEST_NULL; });
  }
};

MpiTransfers::MpiTransfers(std::shared_ptr<MpiLink> link, int tag)
    : pending_(std::make_unique<Pending>()) {
  const MpiUse use;
  pending_->comm = MPI_Comm_f2c(link->handle());
  pending_->link = std::move(link);
  pending_->tag = tag;
}

MpiTransfers::~MpiTransfers() {
  if (pending_->is_done()) return;
  bool ended = false;
  try {
    const MpiUse use;
    ended = end();
  } catch (const std::exception&) {  // finalized: nothing is left to end
  }
  if (ended) return;
  worsen_mpi_exit(MpiExit::kLeave);
  pending_->link->abandon();
  static_cast<void>(pending_.release());
}

// A reception without a message is cancelled at once; one in the middle of its bytes gets a moment.
bool MpiTransfers::end() {
  constexpr int kLooks = 100;
  for (std::size_t i = 0; i < pending_->messages.size(); ++i) {
    pending_->messages[i].left = 0;
    const bool can_cancel =
        !pending_->messages[i].is_sent && pending_->requests[i] != MPI_REQUEST_NULL;
    if (can_cancel) MPI_Cancel(&pending_->requests[i]);
  }
  for (int look = 0; look < kLooks && !pending_->is_done(); ++look) {
    if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    static_cast<void>(pending_->take_completed());
  }
  return pending_->is_done();
}

void MpiTransfers::keep(std::shared_ptr<void> memory) {
  pending_->kept.push_back(std::move(memory));
}

void MpiTransfers::send(int peer, const void* data, std::size_t size) {
  const MpiUse use;
  // MPI only reads what it sends, but not every library declares it const.
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(data));  // NOLINT
  pending_->add({.data = bytes, .left = size, .peer = peer, .is_sent = true});
}

void MpiTransfers::receive(int peer, void* data, std::size_t size) {
  const MpiUse use;
  pending_->add({.data = static_cast<std::byte*>(data), .left = size, .peer = peer});
}

bool MpiTransfers::test() {
  if (pending_->messages.empty()) return true;
  const MpiUse use;
  for (const int index : pending_->take_completed()) {
    const auto i = static_cast<std::size_t>(index);
    if (pending_->messages[i].left > 0) pending_->post(i);
  }
  if (!pending_->is_done()) return false;
  pending_->messages.clear();
  pending_->requests.clear();
  return true;
}

int MpiTransfers::pending_peer() const {
  for (std::size_t i = 0; i < pending_->messages.size(); ++i) {
    if (pending_->requests[i] != MPI_REQUEST_NULL) return pending_->messages[i].peer;
  }
  return -1;
}

}  // namespace hsdp::comm
