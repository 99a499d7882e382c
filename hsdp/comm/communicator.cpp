#include "hsdp/comm/communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "hsdp/comm/argument_check.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/planned_calls.h"
#include "hsdp/comm/stream_call.h"
#include "hsdp/error.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp {
namespace {

Communicator::Engine& require(const std::shared_ptr<Communicator::Engine>& engine) {
  if (engine == nullptr) {
    throw UsageError({.where = "communicator",
                      .expected = "a member of a group",
                      .got = "an empty communicator",
                      .remedy = "split() with a color of at least 0 to be in a group"});
  }
  return *engine;
}

// Control takes members in ascending order.
std::vector<int> ascending(std::vector<int> members) {
  std::ranges::sort(members);
  return members;
}

void check_reduction(Reduction reduction, const Communicator::Engine& engine) {
  if (reduction == Reduction::kExact || engine.name() == "nccl") return;
  throw UsageError({.where = "communicator: native reduction",
                    .expected = "the nccl engine",
                    .got = std::string(engine.name()),
                    .remedy = "use exact"});
}

// The dtype on the wire.
comm::GroupShape shape(const Communicator& group) { return {group.rank(), group.size()}; }

// A group of one sends and rounds nothing: it only runs the kernel.
void sum_alone(const ReduceScatter& args) {
  const void* const row = args.in.data;
  void* const out = args.out.data;
  if (args.in.count == 0) return;
  kernels::sum_rows({.spec = {.row_dtype = args.in.dtype,
                              .wire_dtype = args.in.dtype,
                              .sum_exponent = args.sum_exponent,
                              .divisor = args.divisor,
                              .out_dtype = args.out.dtype},
                     .rows = {&row, 1},
                     .add = args.accumulate ? out : nullptr,
                     .outs = {&out, 1},
                     .count = args.in.count,
                     .nonfinite = args.nonfinite});
}

void copy_alone(ConstTensorView in, TensorView out) {
  if (in.count > 0 && in.data != out.data) std::memcpy(out.data, in.data, in.size_in_bytes());
}

}  // namespace

std::string_view name(Transport transport) {
  constexpr std::array<std::string_view, 7> kNames{
      "none", "in-process", "shared memory", "tcp", "mixed", "nccl", "mpi"};
  return kNames[static_cast<std::size_t>(transport)];
}

std::int64_t message_bytes(std::int64_t count, Dtype wire, Reduction reduction) {
  const bool in_f32 = reduction == Reduction::kNative && sums_in_f32(wire);
  return count * static_cast<std::int64_t>(size_bytes(in_f32 ? Dtype::kF32 : wire));
}

int Communicator::rank() const { return engine_ ? engine_->rank() : -1; }

int Communicator::size() const {
  return engine_ ? static_cast<int>(engine_->world_ranks().size()) : 0;
}

Transport Communicator::transport() const {
  return engine_ ? engine_->transport() : Transport::kNone;
}

std::string_view Communicator::engine_name() const { return require(engine_).name(); }

const std::vector<int>& Communicator::world_ranks() const { return require(engine_).world_ranks(); }

void Communicator::reduce_scatter(const ReduceScatter& args, Stream stream) {
  Engine& engine = require(engine_);
  ReduceScatter full = args;
  if (!full.cut) full.cut.emplace(args.in.count, size());
  comm::check(full, shape(*this));
  check_reduction(args.reduction, engine);
  if (size() == 1 && args.in.device.type == DeviceType::kHost) {
    comm::run_on_stream(stream, [full] { sum_alone(full); });
    return;
  }
  engine.count(CollectiveKind::kReduceScatter, static_cast<std::size_t>(message_bytes(
                                                   args.in.count, args.in.dtype, args.reduction)));
  engine.reduce_scatter(full, stream);
}

void Communicator::all_reduce(const AllReduce& args, Stream stream) {
  Engine& engine = require(engine_);
  comm::check(args, shape(*this));
  check_reduction(args.reduction, engine);
  if (size() == 1 && args.data.device.type == DeviceType::kHost) {
    const ReduceScatter alone{
        .in = args.data, .out = args.data, .divisor = args.divisor, .nonfinite = args.nonfinite};
    comm::run_on_stream(stream, [alone] { sum_alone(alone); });
    return;
  }
  const Dtype wire = args.wire.value_or(args.data.dtype);
  engine.count(CollectiveKind::kAllReduce,
               static_cast<std::size_t>(message_bytes(args.data.count, wire, args.reduction)));
  engine.all_reduce(args, stream);
}

void Communicator::reduce_scatter(ConstTensorView in, TensorView out, Stream stream) {
  reduce_scatter({.in = in, .out = out}, std::move(stream));
}

void Communicator::all_reduce(TensorView data, Stream stream) {
  all_reduce({.data = data}, std::move(stream));
}

void Communicator::all_gather(ConstTensorView in, TensorView out, Stream stream,
                              std::optional<RowCut> cut, CallLabel label) {
  Engine& engine = require(engine_);
  if (!cut) cut.emplace(out.count, size());
  comm::check_all_gather(in, out, *cut, shape(*this));
  if (size() == 1 && in.device.type == DeviceType::kHost) {
    comm::run_on_stream(stream, [in, out] { copy_alone(in, out); });
    return;
  }
  engine.count(CollectiveKind::kAllGather, out.size_in_bytes());
  engine.all_gather(in, out, *cut, label, stream);
}

void Communicator::all_to_all(ConstTensorView in, TensorView out, Stream stream,
                              std::optional<RowCut> cut, CallLabel label) {
  Engine& engine = require(engine_);
  comm::check_all_to_all(in, out, cut, shape(*this));
  if (!cut) cut.emplace(in.count, size());
  if (size() == 1 && in.device.type == DeviceType::kHost) {
    comm::run_on_stream(stream, [in, out] { copy_alone(in, out); });
    return;
  }
  engine.count(CollectiveKind::kAllToAll, in.size_in_bytes());
  engine.all_to_all(in, out, *cut, label, stream);
}

void Communicator::broadcast(TensorView data, int root, Stream stream) {
  Engine& engine = require(engine_);
  comm::check_broadcast(data, root, shape(*this));
  if (size() == 1) return;
  engine.count(CollectiveKind::kBroadcast, data.size_in_bytes());
  engine.broadcast(data, root, stream);
}

void Communicator::barrier(Stream stream) {
  Engine& engine = require(engine_);
  if (size() == 1) return;
  engine.count(CollectiveKind::kBarrier, 0);
  engine.barrier(stream);
}

std::vector<std::string> Communicator::exchange(std::string_view message, std::string_view act) {
  const std::string key = next_exchange_key();
  post(key, {.equal = {std::string(act), std::string(message)}, .keeps_all = true});
  const comm::Agreement all = collect(key, act);
  if (all.places.at(0).said.size() > 1) {
    const std::vector<std::string> acts = all.messages(world_ranks());
    const auto other = std::ranges::find_if(
        acts, [&](const std::string& theirs) { return theirs != acts.front(); });
    const auto rank = static_cast<int>(other - acts.begin());
    throw MismatchError(
        {.where = "communicator",
         .expected = "'" + acts.front() + "' on every rank",
         .got = "'" + *other + "' on " + comm::ranks_text({rank}, size()),
         .remedy = "make the same calls in the same order on every rank, and the same Reducers, "
                   "hooks and optimizers"},
        {world_rank(rank)});
  }
  return all.messages(world_ranks(), 1);
}

void Communicator::post(const std::string& key, const comm::Saying& mine) {
  require(engine_).control().post(key, ascending(world_ranks()), mine);
}

comm::Agreement Communicator::collect(const std::string& key, std::string_view operation) {
  return require(engine_).control().collect(key, ascending(world_ranks()),
                                            {.operation = operation});
}

std::optional<comm::Agreement> Communicator::collect_within(const std::string& key,
                                                            std::string_view operation,
                                                            std::chrono::milliseconds time) {
  return require(engine_).control().collect_within(key, ascending(world_ranks()),
                                                   {.operation = operation}, time);
}

std::uint64_t Communicator::call_hash() const {
  const comm::PlannedCalls* const calls = engine_ ? engine_->planned_calls() : nullptr;
  return calls != nullptr ? calls->hash() : 0;
}

void Communicator::compare_calls(const std::string& key) {
  if (const comm::PlannedCalls* const calls = require(engine_).planned_calls()) calls->compare(key);
}

std::string Communicator::next_exchange_key() { return require(engine_).next_exchange_key(); }

Communicator Communicator::split(int color, int key) {
  return Communicator(require(engine_).split(color, key));
}

SharedMemory Communicator::allocate(std::int64_t count, Dtype dtype) {
  Engine& engine = require(engine_);
  comm::check_allocate(count, dtype, shape(*this));
  return engine.allocate(count, dtype);
}

void Communicator::reserve(std::span<const ReduceScatter> calls) {
  std::vector<ReduceScatter> full(calls.begin(), calls.end());
  for (ReduceScatter& call : full) {
    if (!call.cut) call.cut.emplace(call.in.count, size());
  }
  require(engine_).reserve(full);
}

void Communicator::reserve(std::span<const AllReduce> calls) { require(engine_).reserve(calls); }

std::int64_t Communicator::reserved_bytes() const { return require(engine_).reserved_bytes(); }

void Communicator::wait(const Event& event) { require(engine_).wait(event); }

CollectiveCounts Communicator::stats() const { return require(engine_).counts(); }

void Communicator::abort(const std::string& reason) {
  comm::Control& control = require(engine_).control();
  control.fail({.kind = comm::FailureKind::kAborted,
                .message = "communicator: aborted by rank " + std::to_string(control.rank()) +
                           " of " + std::to_string(control.size()) + ": " + reason,
                .ranks = {control.rank()}});
}

}  // namespace hsdp
