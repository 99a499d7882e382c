#include "hsdp/comm/nccl/nccl_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/stream_call.h"
#include "hsdp/error.h"
#include "hsdp/kernels/norm.h"

namespace hsdp::comm {
namespace {

// HostCall::part: the kinds of the call's memory, two bits each.
enum MemoryWord : std::uint32_t { kNothing = 0, kPlain = 1, kRegistered = 2 };
constexpr unsigned kInShift = 0;
constexpr unsigned kOutShift = 2;
constexpr std::uint32_t kMemoryMask = 3;
constexpr std::uint32_t kNoWork = 1U << 4;
// The word kept for a planned call: which of its memory is registered.
constexpr std::uint32_t kInWord = 1;
constexpr std::uint32_t kOutWord = 2;

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
  if (size() > 1) {
    planned_calls_ = std::make_shared<PlannedCalls>(world_->control, id_, members_, "nccl");
  }
}

std::string NcclGroup::take_scratch(const WorkNeed& work, std::uint32_t in, std::uint32_t out,
                                    const Stream& stream) {
  const bool has_work = (work.between_kinds && in == out) || in == kRegistered ||
                        memory_.has_work(work.bytes, false) ||
                        (work.of_either_kind && memory_.has_work(work.bytes, true));
  if (work.bytes == 0 || has_work) return {};
  try {
    scratch_.emplace(work.bytes, stream);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

void NcclGroup::agree(const Call& call, const Stream& stream) {
  HostCall mine = call.terms;
  waiting_ = wait_in(mine, call.act);
  throw_if_failed(control(), waiting_);
  ++sequence_;
  scratch_.reset();
  if (size() == 1) return;
  const auto word = [this](const ConstTensorView& view) {
    return view.count == 0 ? kNothing : memory_.is_registered(view.data) ? kRegistered : kPlain;
  };
  mine.part = word(call.in) << kInShift | word(call.out) << kOutShift;
  const HostCall planned = mine;
  if (const auto agreed = planned_calls_->begin(planned)) {
    registered_ = {(*agreed & kInWord) != 0, (*agreed & kOutWord) != 0};
    return;
  }
  const std::string without_work = take_scratch(call.work, word(call.in), word(call.out), stream);
  if (!without_work.empty()) mine.part |= kNoWork;
  const std::vector<HostCall> calls = exchange_calls(mine);
  require_work(calls, call.work, without_work);
  registered_ = {agree_on_memory(calls, kInShift), agree_on_memory(calls, kOutShift)};
  if (has_work(call.work)) {
    planned_calls_->agreed(planned,
                           (registered_.in ? kInWord : 0) | (registered_.out ? kOutWord : 0));
  }
}

std::vector<HostCall> NcclGroup::exchange_calls(const HostCall& mine) {
  std::vector<HostCall> calls;
  for (const std::string& bytes : exchange("call", bytes_of(mine))) calls.push_back(call_in(bytes));
  const bool same =
      std::ranges::all_of(calls, [&](const HostCall& call) { return agrees(call, mine); });
  if (!same) end_world(control(), mismatch(calls, members_, "nccl"), waiting_);
  return calls;
}

// Only reserved memory counts: it is the same on all ranks, unlike memory that may be empty on one.
bool NcclGroup::has_work(const WorkNeed& work) const {
  return work.bytes == 0 || registered_.in || (work.between_kinds && !registered_.out) ||
         memory_.has_work(work.bytes, false) ||
         (work.of_either_kind && memory_.has_work(work.bytes, true));
}

void NcclGroup::require_work(std::span<const HostCall> calls, const WorkNeed& work,
                             const std::string& own_reason) {
  const auto has_none = [](const HostCall& call) { return (call.part & kNoWork) != 0; };
  if (std::ranges::none_of(calls, has_none)) return;
  scratch_.reset();
  std::vector<std::string> reasons(calls.size());
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (!has_none(calls[r])) continue;
    reasons[r] = "nccl: " + operation_text(waiting_.operation, waiting_.bucket) +
                 ": no memory for " + std::to_string(work.bytes) + " bytes of work";
  }
  if (!own_reason.empty()) reasons[static_cast<std::size_t>(rank_)] = own_reason;
  throw_agreed(reasons, members_, control());
}

bool NcclGroup::agree_on_memory(std::span<const HostCall> calls, unsigned shift) {
  const auto first_with = [&](std::uint32_t word) {
    return std::ranges::find_if(
        calls, [&](const HostCall& call) { return (call.part >> shift & kMemoryMask) == word; });
  };
  const auto registered = first_with(kRegistered);
  const auto plain = first_with(kPlain);
  if (registered == calls.end()) return false;
  if (plain == calls.end()) return true;
  const int with = members_[static_cast<std::size_t>(registered - calls.begin())];
  const int without = members_[static_cast<std::size_t>(plain - calls.begin())];
  const Message message{.where = "nccl: " + operation_text(waiting_.operation, waiting_.bucket),
                        .expected = "memory of allocate() on every rank or on none",
                        .got = "such on " + ranks_text({with}, control().size()) + ", other on " +
                               ranks_text({without}, control().size()),
                        .remedy = "NCCL would hang; call it with memory of one kind on all ranks"};
  end_world(control(),
            {.kind = FailureKind::kMismatch, .message = message.text(), .ranks = {without}},
            waiting_);
}

std::byte* NcclGroup::work(std::size_t bytes, bool registered, Stream& stream) {
  if (bytes == 0) return nullptr;
  if (std::byte* const kept = memory_.take_work(bytes, registered, stream)) return kept;
  return scratch_ ? scratch_->data() : nullptr;
}

void NcclGroup::require_registered_work(std::size_t bytes) {
  if (memory_.has_work(bytes, true)) return;
  memory_.reserve(*this, bytes, true);
  if (!memory_.has_work(bytes, true)) registered_ = {};
}

std::vector<std::string> NcclGroup::exchange(const std::string& what, const std::string& message) {
  if (size() == 1) return {message};
  const std::string key = id_ + "/" + std::to_string(sequence_) + "/" + what;
  const auto followed = world_->watch->follow_wait(tell_of_wait());
  auto ordered = control().exchange(key, ascending_, message, waiting_);
  std::vector<std::string> messages;
  for (const int member : members_) {
    const auto place = std::ranges::lower_bound(ascending_, member) - ascending_.begin();
    messages.push_back(std::move(ordered[static_cast<std::size_t>(place)]));
  }
  return messages;
}

std::function<void()> NcclGroup::tell_of_wait() const {
  return [calls = planned_calls_, sequence = sequence_] { calls->tell_of_wait(sequence); };
}

void NcclGroup::enqueue(Stream& stream, const Result& result,
                        const std::function<void(Stream&)>& enqueue) {
  bool ran = false;
  run_on_stream(stream, [&] {
    ran = true;
    const Event begun = stream.record();
    begun.throw_if_failed();
    enqueue(stream);
    if (!link_) return;
    for (const TensorView& part : {result.out, result.rest}) {
      if (part.count > 0) kernels::poison(link_->poison(), part, result.nonfinite, stream);
    }
    const Event done = stream.record();
    done.throw_if_failed();
    last_ = done;
    memory_.release_work(done);
    world_->watch->follow(link_.get(), waiting_, tell_of_wait(), begun, done);
  });
  scratch_.reset();
  if (ran) return;
  stream.synchronize();  // throws the error that broke the stream
  throw Error("stream: broken by an earlier task");
}

void NcclGroup::wait_for_calls() const {
  while (!last_.complete()) {
    throw_if_failed(control(), waiting_);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void NcclGroup::fail(const NcclError& error) {
  // A peer that made a different call can report more.
  if (planned_calls_) planned_calls_->tell_of_wait();
  wait_for_verdict(control(), error.remote() ? kVerdictTime : kOwnVerdictTime);
  end_world(control(), nccl_failure(control(), error.remote(), error.what(), waiting_), waiting_);
}

}  // namespace hsdp::comm
