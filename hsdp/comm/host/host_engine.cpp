#include "hsdp/comm/host/host_engine.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/host/control_reduce.h"
#include "hsdp/comm/host/host_allocation.h"
#include "hsdp/comm/host/host_direct.h"
#include "hsdp/comm/host/host_piped.h"
#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/comm/host/staged_reduce.h"
#include "hsdp/comm/stream_call.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

void require_host(Device device, std::string_view operation) {
  if (device.type == DeviceType::kHost) return;
  throw UsageError({.where = std::string(operation),
                    .expected = "host memory, in which the host engine reduces",
                    .got = to_string(device),
                    .remedy = "copy it to the host, or use engine 'nccl'"});
}

bool all_direct(std::span<const HostCall> calls) {
  return std::ranges::all_of(calls, [](const HostCall& call) { return call.part != 0; });
}

}  // namespace

HostEngine::HostEngine(std::unique_ptr<HostGroup> group) : group_(std::move(group)) {}

void HostEngine::run(Stream& stream, std::function<void(HostGroup&)> call) {
  run_on_stream(stream,
                [self = shared_from_this(), call = std::move(call)] { self->run_now(call); });
}

void HostEngine::run_now(const std::function<void(HostGroup&)>& call) {
  const CallGuard::Entry alone = guard_.enter();
  try {
    call(*group_);
  } catch (const AgreedError&) {
    throw;
  } catch (const std::exception& error) {
    end_world(control(), name(), error);
    throw;
  }
}

HostCall HostEngine::call_on(Operation operation, ConstTensorView memory, CallLabel label) const {
  HostCall call = comm::call_on(operation, memory, label);
  if (!group_->shares_memory()) return call;
  if (memory.count == 0) {
    call.part = kNoBytes;
    return call;
  }
  const auto place = group_->memory().find(memory.data, memory.size_in_bytes(), group_->members());
  if (place) {
    call.part = place->part;
    call.offset = place->offset;
  }
  return call;
}

void HostEngine::reduce_scatter(const ReduceScatter& args, Stream& stream) {
  require_host(args.in.device, "reduce_scatter");
  run(stream, [this, args](HostGroup& group) {
    HostCall call = call_on(Operation::kReduceScatter, args.in, {args.bucket, args.planned});
    call.terms = TermsHash().add(*args.cut).value();
    const auto calls = group.agree(call);
    if (all_direct(calls)) {
      direct_reduce_scatter(group, calls, args);
    } else if (group.shares_memory()) {
      group.open_scratch();
      StagedReduce(group, args).run();
    } else {
      piped_reduce_scatter(group, args);
    }
  });
}

void HostEngine::all_reduce(const AllReduce& args, Stream& stream) {
  require_host(args.data.device, "all_reduce");
  run(stream, [this, args](HostGroup& group) {
    HostCall call = call_on(Operation::kAllReduce, args.data, {args.bucket, args.planned});
    call.wire = wire_dtype(args);
    call.wants_nonfinite = args.nonfinite != nullptr ? 1 : 0;
    call.terms = terms_of(args);
    const auto bytes = control_row(group, args);
    const auto calls = group.agree(call, bytes);
    if (!bytes.empty()) {
      control_all_reduce(group, args);
    } else if (all_direct(calls)) {
      direct_all_reduce(group, calls, args);
    } else if (group.shares_memory()) {
      group.open_scratch();
      StagedReduce(group, args).run();
    } else {
      piped_all_reduce(group, args);
    }
  });
}

void HostEngine::all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                            Stream& stream) {
  require_host(in.device, "all_gather");
  run(stream, [this, in, out, cut, label](HostGroup& group) {
    HostCall call = call_on(Operation::kAllGather, in, label);
    call.count = out.count;
    call.terms = TermsHash().add(cut).value();
    const auto calls = group.agree(call, {}, label.act);
    if (all_direct(calls)) {
      direct_all_gather(group, calls, in, out, cut);
    } else {
      piped_all_gather(group, in, out, cut);
    }
  });
}

void HostEngine::all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                            Stream& stream) {
  require_host(in.device, "all_to_all");
  run(stream, [this, in, out, cut, label](HostGroup& group) {
    HostCall call = call_on(Operation::kAllToAll, in, label);
    call.terms = TermsHash().add(cut).value();
    const auto calls = group.agree(call);
    if (all_direct(calls)) {
      direct_all_to_all(group, calls, in, out, cut);
    } else {
      piped_all_to_all(group, in, out, cut);
    }
  });
}

void HostEngine::broadcast(TensorView data, int root, Stream& stream) {
  require_host(data.device, "broadcast");
  run(stream, [this, data, root](HostGroup& group) {
    HostCall call = call_on(Operation::kBroadcast, data);
    call.root = root;
    const auto calls = group.agree(call);
    if (calls[static_cast<std::size_t>(root)].part != 0) {
      direct_broadcast(group, calls, data, root);
    } else {
      piped_broadcast(group, data, root);
    }
  });
}

void HostEngine::barrier(Stream& stream) {
  run(stream, [](HostGroup& group) { group.agree({.operation = Operation::kBarrier}); });
}

std::shared_ptr<Communicator::Engine> HostEngine::split(int color, int key) {
  std::shared_ptr<Engine> engine;
  run_now([&](HostGroup& group) {
    group.agree({.operation = Operation::kSplit});
    const auto messages =
        group.exchange("split", std::to_string(color) + " " + std::to_string(key));
    std::vector<std::pair<int, int>> chosen;  // key, rank
    for (int r = 0; r < group.size(); ++r) {
      const std::string& message = messages[static_cast<std::size_t>(r)];
      const std::size_t gap = message.find(' ');
      if (std::stoi(message.substr(0, gap)) != color) continue;
      chosen.emplace_back(std::stoi(message.substr(gap + 1)), r);
    }
    std::string failure;
    if (color >= 0) {
      std::ranges::sort(chosen);
      std::vector<int> members;
      members.reserve(chosen.size());
      for (const auto& [_, r] : chosen) members.push_back(group.members()[static_cast<size_t>(r)]);
      const std::string id =
          group.id() + "." + std::to_string(group.sequence()) + "c" + std::to_string(color);
      try {
        engine = std::make_shared<HostEngine>(
            std::make_unique<HostGroup>(group.world(), id, std::move(members)));
      } catch (const AgreedError& error) {
        if (error.rank() == group.control().rank()) failure = error.reason();
      }
    }
    // A failure in one new group fails all of them: they are used together.
    throw_agreed(group.exchange("made", failure), group.members(), group.control());
  });
  return engine;
}

SharedMemory HostEngine::allocate(std::int64_t count, Dtype dtype) {
  SharedMemory memory;
  run_now([&](HostGroup& group) { memory = allocate_shared(group, count, dtype); });
  return memory;
}

}  // namespace hsdp::comm
