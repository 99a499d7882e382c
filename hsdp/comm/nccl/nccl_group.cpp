#include "hsdp/comm/nccl/nccl_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/stream_call.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

std::string bytes_of(const HostCall& call) {
  std::string bytes(sizeof(call), '\0');
  std::memcpy(bytes.data(), &call, sizeof(call));
  return bytes;
}

HostCall call_in(const std::string& bytes) {
  HostCall call;
  if (bytes.size() == sizeof(call)) std::memcpy(&call, bytes.data(), sizeof(call));
  return call;
}

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<NcclWorld> world, std::unique_ptr<NcclLink> link,
                     std::string id, std::vector<int> members)
    : world_(std::move(world)),
      link_(std::move(link)),
      id_(std::move(id)),
      members_(std::move(members)),
      ascending_(members_) {
  std::ranges::sort(ascending_);
  rank_ = static_cast<int>(std::ranges::find(members_, control().rank()) - members_.begin());
}

void NcclGroup::agree(const HostCall& mine) {
  waiting_ = {.operation = name(mine.operation), .bucket = mine.bucket};
  throw_if_failed(control(), waiting_);
  ++sequence_;
  if (size() == 1) return;
  std::vector<HostCall> calls;
  for (const std::string& bytes : exchange("call", bytes_of(mine))) calls.push_back(call_in(bytes));
  const bool same =
      std::ranges::all_of(calls, [&](const HostCall& call) { return agrees(call, mine); });
  if (!same) end_world(control(), mismatch(calls, members_, "nccl"), waiting_);
}

std::vector<std::string> NcclGroup::exchange(const std::string& what, const std::string& message) {
  if (size() == 1) return {message};
  const std::string key = id_ + "/" + std::to_string(sequence_) + "/" + what;
  auto ordered = control().exchange(key, ascending_, message, waiting_);
  std::vector<std::string> messages;
  for (const int member : members_) {
    const auto place = std::ranges::lower_bound(ascending_, member) - ascending_.begin();
    messages.push_back(std::move(ordered[static_cast<std::size_t>(place)]));
  }
  return messages;
}

void NcclGroup::enqueue(Stream& stream, const std::function<void(Stream&)>& enqueue) {
  bool ran = false;
  run_on_stream(stream, [&] {
    ran = true;
    const Event begun = stream.record();
    enqueue(stream);
    if (link_) world_->watch->follow(link_.get(), waiting_, begun, stream.record());
  });
  if (ran) return;
  stream.synchronize();  // throws what broke it
  throw Error("stream: broken by an earlier task");
}

void NcclGroup::fail(const NcclError& error) {
  const auto end = std::chrono::steady_clock::now() + kVerdictTime;
  while (error.remote() && !control().failed() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  end_world(control(), nccl_failure(control(), error.remote(), error.what(), waiting_), waiting_);
}

}  // namespace hsdp::comm
