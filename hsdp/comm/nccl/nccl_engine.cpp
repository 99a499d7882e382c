#include "hsdp/comm/nccl/nccl_engine.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/comm/issue_order.h"
#include "hsdp/comm/nccl/nccl_alone.h"
#include "hsdp/comm/nccl/nccl_exact.h"
#include "hsdp/comm/nccl/nccl_native.h"
#include "hsdp/comm/nccl/nccl_split.h"
#include "hsdp/comm/nccl/nccl_work.h"
#include "hsdp/comm/stream_call.h"
#include "hsdp/device/buffer.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

std::uint64_t hash_cut(const RowCut& cut, Reduction reduction = Reduction::kExact) {
  return TermsHash().add(cut).add(static_cast<std::uint64_t>(reduction)).value();
}

}  // namespace

NcclEngine::NcclEngine(std::unique_ptr<NcclGroup> group) : group_(std::move(group)) {}

NcclEngine::~NcclEngine() {
  // NCCL's threads and the watch belong to the parent.
  if (guard_.in_forked_child()) static_cast<void>(group_.release());
}

Transport NcclEngine::transport() const {
  return group_->size() == 1 ? Transport::kNone : Transport::kNccl;
}

void NcclEngine::require_own_device(Device device, std::string_view operation) const {
  if (device == this->device()) return;
  throw UsageError({.where = std::string(operation),
                    .expected = "memory on " + to_string(this->device()) + ", the world's device",
                    .got = to_string(device),
                    .remedy = "move it there, or make the mesh with its device"});
}

void NcclEngine::run_now(const std::function<void(NcclGroup&)>& call) {
  IssueOrder::let_tasks_go_first(control());
  const CallGuard::Entry alone = guard_.enter();
  try {
    call(*group_);
  } catch (const AgreedError&) {
    throw;
  } catch (const NcclError& error) {
    group_->fail(error);
  } catch (const std::exception& error) {
    end_world(control(), name(), error);
    throw;
  }
}

void NcclEngine::agree(const Call& call, const Stream& stream) {
  group_->agree(call.agreed, stream);
  const bool receives_in_work = group_->in_is_registered() && !group_->out_is_registered();
  const std::size_t bytes = call.agreed.work.bytes;
  if (bytes > 0 && receives_in_work) group_->require_registered_work(bytes);
}

void NcclEngine::run(Call call, Stream& stream) {
  if (stream.device().type != DeviceType::kCuda) {
    run_on_stream(stream, [self = shared_from_this(), call = std::move(call)] {
      self->run_on_own_stream(call);
    });
    return;
  }
  require_own_device(stream.device(), hsdp::comm::name(call.agreed.terms.operation));
  run_now([&](NcclGroup& group) {
    agree(call, stream);
    group.enqueue(stream, call.result, [&](Stream& on) { call.enqueue(group, on); });
  });
}

// Runs after what the default stream has done so far; complete when it returns or throws.
void NcclEngine::run_on_own_stream(const Call& call) {
  bool may_run = false;
  try {
    run_now([&](NcclGroup& group) {
      if (!own_stream_) own_stream_ = Stream::create(device(), "hsdp-nccl");
      agree(call, *own_stream_);
      may_run = true;
      own_stream_->wait(Stream::borrow(device(), nullptr).record());
      group.enqueue(*own_stream_, call.result, [&](Stream& on) { call.enqueue(group, on); });
      wait(own_stream_->record());
      control().throw_if_failed();
    });
  } catch (...) {
    if (may_run) settle_own_stream();
    throw;
  }
}

// What was enqueued before a call failed still uses the caller's memory.
void NcclEngine::settle_own_stream() {
  try {
    wait(own_stream_->record());
  } catch (const std::exception&) {  // the world's error, which the caller already has
  }
}

// After an abort the GPU continues, with garbage as data. If the abort hangs, it does not.
void NcclEngine::wait(const Event& event) {
  using std::chrono::microseconds;
  using Clock = std::chrono::steady_clock;
  constexpr microseconds kShortest{10};
  constexpr microseconds kLongest{500};
  // The first is for all waits together, the second for each one after that.
  constexpr std::chrono::seconds kAbortTime{3};
  constexpr std::chrono::milliseconds kShortly{100};
  auto pause = kShortest;
  std::optional<Clock::time_point> end;
  while (!event.complete()) {
    if (!end && control().failed()) {
      Clock::time_point first{};
      const Clock::time_point now = Clock::now();
      abort_end_.compare_exchange_strong(first, now + kAbortTime);
      end = std::max(abort_end_.load(), now + kShortly);
    }
    if (end && Clock::now() > *end) {
      free_after(device(), event);  // no one will wait for the hanging work
      control().throw_if_failed();
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongest);
  }
  const auto& watch = group_->world()->watch;
  const bool aborting = watch != nullptr && watch->aborting();
  event.wait();
  if (aborting) control().throw_if_failed();
}

void NcclEngine::reduce_scatter(const ReduceScatter& args, Stream& stream) {
  require_own_device(args.in.device, "reduce_scatter");
  HostCall terms = call_on(Operation::kReduceScatter, args.in, {args.bucket, args.planned});
  terms.terms = hash_cut(*args.cut, args.reduction);
  const auto enqueue = [args](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return sum_alone(args, on);
    if (sums_natively(args.reduction, args.in.dtype)) return native_reduce_scatter(group, args, on);
    exact_reduce_scatter(group, args, on);
  };
  run({.agreed = {.terms = terms, .in = args.in, .work = {work_bytes(args, group_->size())}},
       .result = {.out = args.out, .nonfinite = args.nonfinite},
       .enqueue = enqueue},
      stream);
}

void NcclEngine::all_reduce(const AllReduce& args, Stream& stream) {
  require_own_device(args.data.device, "all_reduce");
  HostCall terms = call_on(Operation::kAllReduce, args.data, {args.bucket, args.planned});
  terms.wire = args.wire.value_or(args.data.dtype);
  terms.terms = terms_of(args);
  const auto enqueue = [args](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return sum_alone(args, on);
    if (sums_natively(args.reduction, args.data.dtype)) return native_all_reduce(group, args, on);
    exact_all_reduce(group, args, on);
  };
  run({.agreed = {.terms = terms,
                  .in = args.data,
                  .work = {work_bytes(args, group_->size()), sends_from_work(args)}},
       .result = {.out = args.data, .nonfinite = args.nonfinite},
       .enqueue = enqueue},
      stream);
}

void NcclEngine::all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                            Stream& stream) {
  require_own_device(out.device, "all_gather");
  HostCall terms = call_on(Operation::kAllGather, out, label);
  terms.terms = hash_cut(cut);
  const auto enqueue = [in, out, cut](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return copy_alone(in, out, on);
    gather_rows(group, in, out, cut, on);
  };
  NcclGroup::Result result{out};
  const std::int64_t own = cut.begin(group_->rank());
  const std::int64_t end = cut.begin(group_->rank() + 1);
  if (in.data == out.slice(own, in.count).data) {  // an abort must not poison this rank's own row
    result = {.out = out.slice(0, own), .rest = out.slice(end, out.count - end)};
  }
  run({.agreed = {.terms = terms, .in = in, .out = out, .act = label.act},
       .result = result,
       .enqueue = enqueue},
      stream);
}

void NcclEngine::all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                            Stream& stream) {
  require_own_device(in.device, "all_to_all");
  HostCall terms = call_on(Operation::kAllToAll, in, label);
  terms.terms = hash_cut(cut);
  const auto enqueue = [in, out, cut](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return copy_alone(in, out, on);
    transpose_rows(group, in, out, cut, on);
  };
  run({.agreed = {.terms = terms,
                  .in = in,
                  .out = out,
                  .work = {.bytes = work_bytes(in, cut), .between_kinds = true}},
       .result = {.out = out},
       .enqueue = enqueue},
      stream);
}

void NcclEngine::broadcast(TensorView data, int root, Stream& stream) {
  require_own_device(data.device, "broadcast");
  HostCall terms = call_on(Operation::kBroadcast, data);
  terms.root = root;
  const auto enqueue = [data, root](NcclGroup& group, Stream& on) {
    broadcast_bytes(group, data, root, on);
  };
  NcclGroup::Result result{};
  if (root != rank()) result.out = data;
  run({.agreed = {.terms = terms, .in = data, .out = data}, .result = result, .enqueue = enqueue},
      stream);
}

void NcclEngine::barrier(Stream& stream) {
  const auto enqueue = [](NcclGroup& group, Stream& on) { meet(group, on); };
  run({.agreed = {.terms = {.operation = Operation::kBarrier},
                  .work = {static_cast<std::size_t>(group_->size())}},
       .enqueue = enqueue},
      stream);
}

std::shared_ptr<Communicator::Engine> NcclEngine::split(int color, int key) {
  std::shared_ptr<Engine> engine;
  run_now([&](NcclGroup& group) {
    auto part = split_group(group, color, key);
    if (part != nullptr) engine = std::make_shared<NcclEngine>(std::move(part));
  });
  return engine;
}

SharedMemory NcclEngine::allocate(std::int64_t count, Dtype dtype) {
  SharedMemory memory;
  run_now([&](NcclGroup& group) { memory = group.memory().allocate(group, count, dtype); });
  return memory;
}

void NcclEngine::reserve(std::span<const ReduceScatter> calls) {
  WorkSizes most;
  for (const ReduceScatter& call : calls) {
    most.add(work_bytes(call, group_->size()), group_->memory().is_registered(call.in.data));
  }
  reserve(most);
}

void NcclEngine::reserve(std::span<const AllReduce> calls) {
  WorkSizes most;
  for (const AllReduce& call : calls) {
    const bool registered = sends_from_work(call) || group_->memory().is_registered(call.data.data);
    most.add(work_bytes(call, group_->size()), registered);
  }
  reserve(most);
}

void NcclEngine::reserve(const WorkSizes& most) {
  if (group_->size() == 1) return;
  for (const bool registered : {false, true}) {
    const std::size_t bytes = most.bytes[registered ? 1 : 0];
    if (bytes == 0) continue;
    run_now([&](NcclGroup& group) {
      group.agree({.count = static_cast<std::int64_t>(bytes), .operation = Operation::kAllocate});
      group.memory().reserve(group, bytes, registered);
    });
  }
}

}  // namespace hsdp::comm
