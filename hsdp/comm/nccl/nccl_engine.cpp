#include "hsdp/comm/nccl/nccl_engine.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>
#include <utility>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/nccl/nccl_alone.h"
#include "hsdp/comm/nccl/nccl_exact.h"
#include "hsdp/comm/nccl/nccl_memory.h"
#include "hsdp/comm/nccl/nccl_native.h"
#include "hsdp/comm/nccl/nccl_split.h"
#include "hsdp/comm/stream_call.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

std::uint64_t hash_cut(const RowCut& cut, Reduction reduction = Reduction::kExact) {
  return TermsHash().add(cut).add(static_cast<std::uint64_t>(reduction)).value();
}

bool sums_natively(Reduction reduction, Dtype dtype) {
  return reduction == Reduction::kNative && is_gradient_dtype(dtype);
}

}  // namespace

NcclEngine::NcclEngine(std::unique_ptr<NcclGroup> group) : group_(std::move(group)) {}

NcclEngine::~NcclEngine() {
  // NCCL's threads and the watch are the parent's.
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

void NcclEngine::run(const HostCall& call, Stream& stream, const Enqueue& enqueue) {
  if (stream.device().type != DeviceType::kCuda) {
    run_on_stream(stream, [self = shared_from_this(), call, enqueue] {
      self->run_on_own_stream(call, enqueue);
    });
    return;
  }
  require_own_device(stream.device(), hsdp::comm::name(call.operation));
  run_now([&](NcclGroup& group) {
    group.agree(call);
    group.enqueue(stream, [&](Stream& on) { enqueue(group, on); });
  });
}

// After what the default stream did so far, and complete when it returns.
void NcclEngine::run_on_own_stream(const HostCall& call, const Enqueue& enqueue) {
  run_now([&](NcclGroup& group) {
    if (!own_stream_) own_stream_ = Stream::create(device(), "hsdp-nccl");
    group.agree(call);
    own_stream_->wait(Stream::borrow(device(), nullptr).record());
    group.enqueue(*own_stream_, [&](Stream& on) { enqueue(group, on); });
    wait(own_stream_->record());
    control().throw_if_failed();
  });
}

// An aborted communicator lets the GPU go on, with data that nobody sent; one whose abort hangs
// does not.
void NcclEngine::wait(const Event& event) {
  using std::chrono::microseconds;
  using Clock = std::chrono::steady_clock;
  constexpr microseconds kShortest{10};
  constexpr microseconds kLongest{500};
  constexpr std::chrono::seconds kAbortTime{3};
  auto pause = kShortest;
  std::optional<Clock::time_point> end;
  while (!event.complete()) {
    if (!end && control().failed()) end = Clock::now() + kAbortTime;
    if (end && Clock::now() > *end) control().throw_if_failed();
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
  HostCall call = call_on(Operation::kReduceScatter, args.in);
  call.bucket = args.bucket;
  call.terms = hash_cut(*args.cut, args.reduction);
  run(call, stream, [args](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return sum_alone(args, on);
    if (sums_natively(args.reduction, args.in.dtype)) return native_reduce_scatter(group, args, on);
    exact_reduce_scatter(group, args, on);
  });
}

void NcclEngine::all_reduce(const AllReduce& args, Stream& stream) {
  require_own_device(args.data.device, "all_reduce");
  HostCall call = call_on(Operation::kAllReduce, args.data);
  call.bucket = args.bucket;
  call.wire = args.wire.value_or(args.data.dtype);
  call.terms = TermsHash()
                   .add(std::bit_cast<std::uint32_t>(args.divisor))
                   .add(static_cast<std::uint64_t>(args.send_exponent))
                   .add(static_cast<std::uint64_t>(args.total_exponent))
                   .add(static_cast<std::uint64_t>(args.reduction))
                   .value();
  run(call, stream, [args](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return sum_alone(args, on);
    if (sums_natively(args.reduction, args.data.dtype)) return native_all_reduce(group, args, on);
    exact_all_reduce(group, args, on);
  });
}

void NcclEngine::all_gather(ConstTensorView in, TensorView out, const RowCut& cut, int bucket,
                            Stream& stream) {
  require_own_device(out.device, "all_gather");
  HostCall call = call_on(Operation::kAllGather, out);
  call.bucket = bucket;
  call.terms = hash_cut(cut);
  run(call, stream, [in, out, cut](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return copy_alone(in, out, on);
    gather_rows(group, in, out, cut, on);
  });
}

void NcclEngine::all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, int bucket,
                            Stream& stream) {
  require_own_device(in.device, "all_to_all");
  HostCall call = call_on(Operation::kAllToAll, in);
  call.bucket = bucket;
  call.terms = hash_cut(cut);
  run(call, stream, [in, out, cut](NcclGroup& group, Stream& on) {
    if (group.size() == 1) return copy_alone(in, out, on);
    transpose_rows(group, in, out, cut, on);
  });
}

void NcclEngine::broadcast(TensorView data, int root, Stream& stream) {
  require_own_device(data.device, "broadcast");
  HostCall call = call_on(Operation::kBroadcast, data);
  call.root = root;
  run(call, stream,
      [data, root](NcclGroup& group, Stream& on) { broadcast_bytes(group, data, root, on); });
}

void NcclEngine::barrier(Stream& stream) {
  run({.operation = Operation::kBarrier}, stream,
      [](NcclGroup& group, Stream& on) { meet(group, on); });
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
  run_now([&](NcclGroup& group) { memory = allocate_registered(group, count, dtype); });
  return memory;
}

}  // namespace hsdp::comm
