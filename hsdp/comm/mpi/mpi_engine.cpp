#include "hsdp/comm/mpi/mpi_engine.h"

#include <utility>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/comm/mpi/mpi_copy.h"
#include "hsdp/comm/mpi/mpi_library.h"
#include "hsdp/comm/mpi/mpi_reduce.h"
#include "hsdp/comm/mpi/mpi_split.h"
#include "hsdp/comm/stream_call.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

void require_host(Device device, std::string_view operation) {
  if (device.type == DeviceType::kHost) return;
  throw UsageError({.where = std::string(operation),
                    .expected = "host memory, in which the mpi engine reduces",
                    .got = to_string(device),
                    .remedy = "copy it to the host, or use engine 'nccl'"});
}

}  // namespace

MpiEngine::MpiEngine(std::unique_ptr<MpiGroup> group) : group_(std::move(group)) {}

void MpiEngine::run(Stream& stream, std::function<void(MpiGroup&)> call) {
  run_on_stream(stream,
                [self = shared_from_this(), call = std::move(call)] { self->run_now(call); });
}

void MpiEngine::run_now(const std::function<void(MpiGroup&)>& call) {
  const CallGuard::Entry alone = guard_.enter();
  try {
    call(*group_);
  } catch (const AgreedError&) {
    throw;
  } catch (const std::exception& error) {
    group_->abandon();
    end_world(control(), name(), error);
    throw;
  }
}

void MpiEngine::reduce_scatter(const ReduceScatter& args, Stream& stream) {
  require_host(args.in.device, "reduce_scatter");
  run(stream, [args](MpiGroup& group) {
    HostCall call = call_on(Operation::kReduceScatter, args.in, {args.bucket, args.planned});
    call.terms = TermsHash().add(*args.cut).value();
    group.agree(call);
    MpiReduce(group, args).run();
  });
}

void MpiEngine::all_reduce(const AllReduce& args, Stream& stream) {
  require_host(args.data.device, "all_reduce");
  run(stream, [args](MpiGroup& group) {
    HostCall call = call_on(Operation::kAllReduce, args.data, {args.bucket, args.planned});
    call.wire = wire_dtype(args);
    call.terms = terms_of(args);
    group.agree(call);
    MpiReduce(group, args).run();
  });
}

void MpiEngine::all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                           Stream& stream) {
  require_host(in.device, "all_gather");
  run(stream, [in, out, cut, label](MpiGroup& group) {
    HostCall call = call_on(Operation::kAllGather, out, label);
    call.terms = TermsHash().add(cut).value();
    group.agree(call, label.act);
    mpi_all_gather(group, in, out, cut);
  });
}

void MpiEngine::all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                           Stream& stream) {
  require_host(in.device, "all_to_all");
  run(stream, [in, out, cut, label](MpiGroup& group) {
    HostCall call = call_on(Operation::kAllToAll, in, label);
    call.terms = TermsHash().add(cut).value();
    group.agree(call);
    mpi_all_to_all(group, in, out, cut);
  });
}

void MpiEngine::broadcast(TensorView data, int root, Stream& stream) {
  require_host(data.device, "broadcast");
  run(stream, [data, root](MpiGroup& group) {
    HostCall call = call_on(Operation::kBroadcast, data);
    call.root = root;
    group.agree(call);
    mpi_broadcast(group, data, root);
  });
}

void MpiEngine::barrier(Stream& stream) {
  run(stream, [](MpiGroup& group) { group.agree({.operation = Operation::kBarrier}); });
}

std::shared_ptr<Communicator::Engine> MpiEngine::split(int color, int key) {
  std::shared_ptr<Engine> engine;
  run_now([&](MpiGroup& group) {
    if (auto place = split_group(group, color, key)) {
      engine =
          std::make_shared<MpiEngine>(std::make_unique<MpiGroup>(group.world(), std::move(*place)));
    }
  });
  return engine;
}

SharedMemory MpiEngine::allocate(std::int64_t count, Dtype dtype) {
  SharedMemory memory;
  run_now([&](MpiGroup& group) { memory = allocate_private(group, count, dtype); });
  return memory;
}

}  // namespace hsdp::comm
