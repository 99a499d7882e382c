#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/engine.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/comm/retry.h"
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
    throw UsageError(
        {.where = "engine", .expected = "one of auto, host, nccl, mpi", .got = "'" + name + "'"});
  }
  if (on_cuda) {
    throw UsageError({.where = "engine: host",
                      .expected = "device cpu",
                      .got = to_string(options.device),
                      .remedy = "use engine 'nccl' for CUDA devices"});
  }
  return EngineKind::kHost;
}

TransportChoice choose_transport(const WorldOptions& options) {
  const char* const text = std::getenv("HSDP_TRANSPORT");
  const std::string_view forced = text == nullptr ? "" : text;
  if (forced == "tcp") return TransportChoice::kTcp;
  if (!forced.empty() && forced != "auto") {
    throw UsageError({.where = "launch: HSDP_TRANSPORT",
                      .expected = "auto or tcp",
                      .got = "'" + std::string(forced) + "'"});
  }
  return options.transport;
}

// The last world that this process connected. Only its users keep it alive.
struct OpenWorld {
  std::mutex mutex;
  std::weak_ptr<comm::Control> control;
  int share_count = 0;  // how often ranks have asked whether to share `control`
  std::uint32_t generation = 0;
  std::weak_ptr<Communicator::Engine> engine;
  EngineKind kind = EngineKind::kHost;
  TransportChoice transport = TransportChoice::kAuto;
  Device device{};
};

OpenWorld& open_world() {
  static OpenWorld world;
  return world;
}

void require_same_place(const comm::Control& control, const comm::LaunchEnvironment& launch) {
  if (control.rank() == launch.rank && control.size() == launch.size) return;
  const auto place = [](int rank, int size) {
    return "rank " + std::to_string(rank) + " of " + std::to_string(size);
  };
  throw UsageError({.where = "world",
                    .expected = place(control.rank(), control.size()) +
                                ", as in the world that this process has open",
                    .got = place(launch.rank, launch.size),
                    .remedy = "close its meshes first"});
}

// The parts of the open world that all ranks continue to use.
struct Shared {
  std::shared_ptr<comm::Control> control;
  std::shared_ptr<Communicator::Engine> engine;
};

// A rank knows only its own users, and these release the world at different times on each rank. The
// ranks share what all of them still have [Note: sharing a world].
Shared agree_to_share(OpenWorld& open, std::shared_ptr<comm::Control> control,
                      std::shared_ptr<Communicator::Engine> engine) {
  const std::string key = "connect_world " + std::to_string(open.share_count++);
  const std::string_view mine = engine ? "engine" : "control";
  std::optional<std::vector<std::string>> all;
  try {
    all = control->exchange_while_open(key, mine, {.operation = "connect"});
  } catch (const RankError&) {  // the open world has failed; some ranks may have known before
    if (!control->failed()) throw;
  }
  if (!all) return {};
  const bool all_have_it = std::ranges::count(*all, "engine") == std::ssize(*all);
  return {std::move(control), all_have_it ? std::move(engine) : nullptr};
}

}  // namespace

Communicator connect_world(const WorldOptions& options) {
  comm::require_timeout(options.timeout, "world: timeout");
  const EngineKind kind = choose_engine(options);
  const TransportChoice transport = choose_transport(options);
  OpenWorld& open = open_world();
  const std::lock_guard lock(open.mutex);
  if (open.generation != comm::fork_generation() && !open.control.expired()) {
    throw UsageError({.where = "world",
                      .expected = "a process that did not inherit an open world",
                      .got = "a forked child",
                      .remedy = "fork before the parent connects, or start a new process"});
  }
  const auto end = std::chrono::steady_clock::now() + options.timeout;
  const comm::LaunchEnvironment launch =
      options.launch ? *options.launch
                     : comm::wait_out_limit(end, [] { return comm::detect_launch(); });
  Shared shared;
  if (auto control = open.control.lock()) {
    require_same_place(*control, launch);
    auto engine = open.engine.lock();
    const bool fits = engine && open.kind == kind && open.transport == transport &&
                      open.device == options.device && &engine->control() == control.get();
    if (!control->failed()) {
      shared = agree_to_share(open, std::move(control), fits ? std::move(engine) : nullptr);
    }
  }
  if (shared.engine) return Communicator(std::move(shared.engine));
  if (!shared.control) {
    shared.control = comm::connect_control(
        comm::meet_over_mpi(launch, kind == EngineKind::kMpi, options.timeout), options.timeout);
    open.control = shared.control;
    open.share_count = 0;
    open.generation = comm::fork_generation();
  }
  const std::shared_ptr<comm::Control>& control = shared.control;
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
