#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "hsdp/comm/engine.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/comm/timeout_range.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

enum class EngineKind { kHost, kNccl, kMpi };

EngineKind choose_engine(const WorldOptions& options) {
  const bool on_cuda = options.device.type == DeviceType::kCuda;
  const std::string& name = options.engine;
  if (name == "nccl" || (name == "auto" && on_cuda)) {
    comm::require_nccl();
    return EngineKind::kNccl;
  }
  if (name == "mpi") {
    comm::require_mpi();
    return EngineKind::kMpi;
  }
  if (name != "auto" && name != "host") {
    throw UsageError("engine: expected one of auto, host, nccl, mpi, got '" + name + "'");
  }
  if (on_cuda) {
    throw UsageError("engine: host: expected device cpu, got " + to_string(options.device) +
                     "; use engine 'nccl' for CUDA devices");
  }
  return EngineKind::kHost;
}

TransportChoice choose_transport(const WorldOptions& options) {
  const char* const text = std::getenv("HSDP_TRANSPORT");
  const std::string_view forced = text == nullptr ? "" : text;
  if (forced == "tcp") return TransportChoice::kTcp;
  if (!forced.empty() && forced != "auto") {
    throw UsageError("HSDP_TRANSPORT: expected auto or tcp, got '" + std::string(forced) + "'");
  }
  return options.transport;
}

// The connections that this process has, held by their users only.
struct OpenWorld {
  std::mutex mutex;
  std::weak_ptr<comm::Control> control;
  std::weak_ptr<Communicator::Engine> engine;
  EngineKind kind = EngineKind::kHost;
  TransportChoice transport = TransportChoice::kAuto;
  Device device{};
  std::uint32_t generation = 0;
};

OpenWorld& open_world() {
  static OpenWorld world;
  return world;
}

std::shared_ptr<comm::Control> share_control(OpenWorld& open, const WorldOptions& options,
                                             EngineKind kind) {
  const comm::LaunchEnvironment launch = options.launch ? *options.launch : comm::detect_launch();
  if (auto control = open.control.lock()) {
    if (control->rank() != launch.rank || control->size() != launch.size) {
      throw UsageError("world: this process is already rank " + std::to_string(control->rank()) +
                       " of " + std::to_string(control->size()) + ", expected the same, got rank " +
                       std::to_string(launch.rank) + " of " + std::to_string(launch.size));
    }
    return control;
  }
  auto control = comm::connect_control(
      comm::meet_over_mpi(launch, kind == EngineKind::kMpi, options.timeout), options.timeout);
  open.control = control;
  open.generation = comm::fork_generation();
  return control;
}

}  // namespace

Communicator connect_world(const WorldOptions& options) {
  comm::require_timeout(options.timeout, "world: timeout");
  const EngineKind kind = choose_engine(options);
  const TransportChoice transport = choose_transport(options);
  OpenWorld& open = open_world();
  const std::lock_guard lock(open.mutex);
  if (open.generation != comm::fork_generation() && !open.control.expired()) {
    throw UsageError(
        "world: a forked child cannot connect while its parent's world is open; fork first, or "
        "start the process anew");
  }
  const std::shared_ptr<comm::Control> control = share_control(open, options, kind);
  if (auto engine = open.engine.lock();
      engine && open.kind == kind && open.transport == transport && open.device == options.device &&
      &engine->control() == control.get()) {
    return Communicator(std::move(engine));
  }
  Communicator world;
  switch (kind) {
    case EngineKind::kHost:
      world = comm::host_world(control, transport);
      break;
    case EngineKind::kNccl:
      world = comm::nccl_world(control, options.device);
      break;
    case EngineKind::kMpi:
      world = comm::mpi_world(control);
      break;
  }
  open.engine = world.engine();
  open.kind = kind;
  open.transport = transport;
  open.device = options.device;
  return world;
}

}  // namespace hsdp
